"""`leadout relay`: stream a server's ring to learners on other hosts."""

from pathlib import Path
from typing import Annotated

import typer


def relay(
    ring: Annotated[Path, typer.Argument(help="Folder of `leadout serve --learn-states`.")],
    key: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="File with the key that learners need; the same as their --states-key.",
        ),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where learners connect; port 0: a free one.")
    ] = "127.0.0.1:7600",
    buffer_gib: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            min=0.001,
            help="Memory for what a slow learner has not fetched; beyond it the oldest is dropped.",
        ),
    ] = 1.0,
) -> None:
    """Stream the sequences of a ring to `leadout learn --states tcp://HOST:PORT` elsewhere.

    Connections are encrypted, and those without the key are closed. The server never waits for a
    relay, nor a relay for a learner.
    """
    from leadout.engine.child_process import forbid_core_dumps
    from leadout.ring.channel import read_keys
    from leadout.ring.relay import Relay, parse_address
    from leadout.ring.sequences import RingReader

    address, keys = parse_address(listen, "--listen"), read_keys(key)
    forbid_core_dumps()
    reader = RingReader(ring)
    running = Relay(reader, address, keys, max_waiting_bytes=int(buffer_gib * 2**30))
    typer.echo(f"Relay of {ring} on {address[0]}:{running.port}. Stop it with Ctrl-C.")
    try:
        running.run()
    except KeyboardInterrupt:
        typer.echo("leadout: stopped.", err=True)
    finally:
        running.close()
        reader.close()
