"""Checks of PyTorch's zip archives before PyTorch allocates the memory that they declare."""

from __future__ import annotations

import os
import zipfile
from typing import BinaryIO


def check_archive(file: BinaryIO) -> None:
    """Refuse a file that `torch.save` cannot have written: its archives are never compressed.

    A compressed member may unpack to a thousand times its size; PyTorch's older format, which is no archive, allocates the size
    that its header declares.

    Args:
        file: its position is restored.

    Raises:
        ValueError: not a zip archive, a compressed member, or members that declare more bytes than the file has.
    """
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as err:
        raise ValueError(f"not an archive written by torch.save: {err}") from None
    finally:
        file.seek(at)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"its member {member.filename!r:.100} is compressed, which torch.save never does")
    declared = sum(member.file_size for member in members)
    if declared > size:
        raise ValueError(f"its members declare {declared} bytes, but the file has {size}")
