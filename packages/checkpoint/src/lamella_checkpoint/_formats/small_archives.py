"""Archives of `torch.save` with one small tensor, copied from a template.

Note [Archives alike]
    Without the archive's own CRC-32, the archives of two plain tensors of equal shape and dtype differ in the elements
    alone. torch writes such an archive in 39 calls of `write` and 0.3 ms, longer than anything else about a tensor of a
    few kilobytes; a checkpoint of experts has hundreds of thousands of them.
"""

import io
from functools import lru_cache
from typing import BinaryIO, Final, NamedTuple, cast

import torch

from lamella_checkpoint._formats.checksums import ChecksumStream
from lamella_files import records

_MAX_NBYTES: Final = 64 << 10


class _Template(NamedTuple):
    """The bytes of an archive before and behind the tensor's elements."""

    head: bytes
    tail: bytes


def save(value: object, stream: ChecksumStream) -> None:
    """Append the archive that `torch.save` would write.

    Raises:
        OSError: The file system refused.
    """
    if isinstance(value, torch.Tensor) and _is_templated(value):
        template = _template(tuple(value.shape), value.dtype)
        stream.write(template.head + value.view(-1).view(torch.uint8).numpy().tobytes() + template.tail)
        return
    try:
        torch.save(value, cast(BinaryIO, stream))  # torch calls only `write` and `flush` of the stream.
    except RuntimeError as error:  # On a full disk, torch's writer reports only an unexpected position.
        raise stream.error or error from error


def _is_templated(tensor: torch.Tensor) -> bool:
    """Whether shape and dtype tell all about a tensor's archive but the elements."""
    return (
        0 < tensor.nbytes <= _MAX_NBYTES
        and type(tensor) is torch.Tensor
        and not torch.serialization.get_crc32_options()
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


@lru_cache(maxsize=1024)
def _template(shape: tuple[int, ...], dtype: torch.dtype) -> _Template:
    stream = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype), stream)
    elements = records(stream)["data/0"]
    content = stream.getvalue()
    return _Template(content[: elements.start], content[elements.start + elements.length :])
