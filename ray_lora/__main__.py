"""The command `ray-lora`, also `python -m ray_lora`."""

from importlib import import_module

import click

ADAPTER_COMMANDS = {
    **dict.fromkeys(("inspect", "compress", "merge", "convert"), "ray_lora.adapters.adapter_commands"),
    **dict.fromkeys(("list", "load", "unload", "pin", "unpin", "weight", "validate"), "ray_lora.serve.server_commands"),
}


class LazyGroup(click.Group):
    """Imports a command when it is asked for: some need Ray, others torch, and each takes seconds.

    Args:
        commands: by name, the module that has it as `<name>_command`.
    """

    def __init__(self, name: str, commands: dict[str, str], help: str) -> None:
        super().__init__(name, help=help)
        self._modules = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._modules, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(self._modules[cmd_name]), f"{cmd_name}_command")
        return command


COMMANDS = {
    "doctor": "ray_lora.cluster.doctor",
    "key": "ray_lora.serve.key_commands",
    "serve": "ray_lora.serve.cli",
}

main = LazyGroup("ray-lora", COMMANDS, "Multi-LoRA serving on Ray Serve.")
main.add_command(LazyGroup("adapter", ADAPTER_COMMANDS, "Adapters, on disk and of a server."))


if __name__ == "__main__":
    main()
