"""Files -> checked, sharded weights: from a directory that PEFT wrote to what each rank keeps in its pages."""
