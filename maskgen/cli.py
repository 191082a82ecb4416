"""The command line: its verbs, and the one place where errors become messages and exit codes.

Exit codes: 0 done, 1 failed, 2 usage or spec, 3 verification found a difference. Results go to
stdout, everything else to stderr. Nothing here imports torch; a verb does when it runs.
"""

from typing import Any

import click

from maskgen import verbs_masks, verbs_versions
from maskgen.neighbours import hidden_cache


class TranslatingGroup(click.Group):
    """A group whose verbs may raise the errors of maskgen and cache."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an error of ours becomes a message and the error's exit code."""
        if (hidden := hidden_cache()) is not None:
            raise click.ClickException(hidden)
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            from cache.address import without_secrets_in

            error.message = without_secrets_in(error.message)  # type: ignore[misc]
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            from cache.address import without_secrets_in
            from cache.errors import CacheError
            from maskgen.errors import MaskgenError

            if isinstance(error, (CacheError, MaskgenError)):
                from maskgen.runfile import with_run_file

                notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                message = f"Error: {error}{notes}"
                if ctx.obj is not None:
                    message = with_run_file(message, ctx.obj.run_file, ctx.obj.settings)
                click.echo(without_secrets_in(message), err=True)
                raise click.exceptions.Exit(error.exit_code) from error
            raise


@click.group(cls=TranslatingGroup, context_settings={"show_default": True})
def main() -> None:
    """Build FlexAttention masks ahead of training, check them, and ship them.

    Exit codes: 0 done, 1 failed, 2 usage or spec, 3 verification found a difference.
    """


for verb in (*verbs_masks.VERBS, *verbs_versions.VERBS):
    main.add_command(verb)
