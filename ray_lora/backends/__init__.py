"""Facts about a device, one file each: memory, collectives, and which kernels it has."""
