"""Work dealt out to hosts, and what came of it told to all: everything but pixels, which their own host alone needs.

So every host knows the whole step, and judges it like one host would; only what is packed and computed is its own.
"""

import copyreg
import io
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from paravt_jax.run.hosts import Hosts
from rollout.picture import Picture

Item = TypeVar("Item")
Result = TypeVar("Result")


async def dealt(
    hosts: Hosts,
    stream: str,
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], Awaitable[list[Result]]],
) -> list[Result]:
    """What `work` makes of all items, in their order; each host works on those of which it is the turn."""
    own = await work(items[hosts.index :: hosts.num])
    if hosts.num == 1:
        return own
    told = [pickle.loads(said) for said in await hosts.gathered(stream, without_pixels(own))]
    told[hosts.index] = own
    return [told[place % hosts.num][place // hosts.num] for place in range(len(items))]


def without_pixels(value: Any) -> bytes:
    """Pickled, every picture by its name and size."""
    file = io.BytesIO()
    _Light(file).dump(value)
    return file.getvalue()


class _Light(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[Picture] = lambda picture: (Picture.elsewhere, (picture.key, picture.size_px))
