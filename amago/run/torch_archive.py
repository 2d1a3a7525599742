"""Zip archives of tensors, looked at before PyTorch allocates what they declare."""

from __future__ import annotations

import os
import zipfile
from typing import BinaryIO


def check_archive(file: BinaryIO) -> None:
    """Refuse what `torch.save` would not have written: its archives are stored, never compressed.

    A compressed member may unpack to a thousand times its size, and the older format without an archive allocates what its
    header declares. The position in the file stays as it was.

    Raises:
        ValueError: no zip archive, a compressed member, or members that declare more bytes than the file has.
    """
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as err:
        raise ValueError(f"no archive of tensors as torch.save writes them: {err}") from None
    finally:
        file.seek(at)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"its member {member.filename!r:.100} is compressed, which torch.save never does")
    declared = sum(member.file_size for member in members)
    if declared > size:
        raise ValueError(f"its members declare {declared} bytes, but the file has {size}")
