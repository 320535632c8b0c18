"""The command `ray-lora`, also `python -m ray_lora`."""

import click


class Commands(click.Group):
    """Imports a command when it is asked for: one needs Ray, the other torch, and each takes seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["adapter", "key", "serve"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "adapter":
            from ray_lora.adapters.adapter_commands import adapter_group

            return adapter_group
        if cmd_name == "key":
            from ray_lora.serve.key_commands import key_group

            return key_group
        if cmd_name == "serve":
            from ray_lora.serve.cli import serve_command

            return serve_command
        return None


@click.command(cls=Commands)
def main() -> None:
    """Multi-LoRA serving on Ray Serve."""


if __name__ == "__main__":
    main()
