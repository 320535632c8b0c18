"""`ray-lora key`: make API keys."""

import json
import secrets

import click
from pydantic import ValidationError

from ray_lora.config import first_fault
from ray_lora.tenant import ApiKey, hash_key


@click.group("key")
def key_command() -> None:
    """Make API keys."""


@key_command.command("new")
@click.argument("name")
@click.option("--adapters", default="*", show_default=True, help="Names it may use, with commas and *.")
@click.option("--may-load", is_flag=True, help="It may load, replace and unload adapters of these names.")
def new_key(name: str, adapters: str, may_load: bool) -> None:
    """Make a key for NAME. The key is shown once, on standard error; standard output has the line for api_keys_file:

    ray-lora key new acme --adapters 'acme-*' >> keys.yaml
    """
    key = f"sk-{secrets.token_urlsafe(32)}"
    entry = {"name": name, "sha256": hash_key(key), "adapters": adapters.split(","), "may_load": may_load}
    try:
        ApiKey.model_validate(entry)
    except ValidationError as error:
        raise click.UsageError(first_fault(error)) from None
    click.echo(f"The key, shown only now: {key}", err=True)
    click.echo(f"- {json.dumps(entry)}")
