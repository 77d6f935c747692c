"""The pinned wheel: found, checked, and packed again with the series applied."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import importlib.util
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .console import UserError
from .pin import Pin


# A fixed time for the members that are written anew, so that packing is reproducible.
_MEMBER_TIME = (2026, 1, 1, 0, 0, 0)
_LOCAL_HEADER = struct.Struct("<26xHH")
_PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def obtain(pin: Pin, cache: Path) -> Path:
    """Download the pinned wheel with the user's own pip configuration, once."""
    cache.mkdir(parents=True, exist_ok=True)
    for path in sorted(cache.glob(f"torch-{pin.version}*-{_PYTHON_TAG}-*.whl")):
        return path
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"expected pip in {sys.executable}, found none; install it (on Debian: "
            "apt-get install python3-pip) or give --wheel FILE"
        )
    said = ""
    for version in (f"{pin.version}+cpu", pin.version):
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            result = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
                + ["--disable-pip-version-check", "--dest", aside, f"torch=={version}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            for path in Path(aside).glob("*.whl"):
                return path.replace(cache / path.name)
            said = " ".join(result.stderr.split()[-30:])
    raise UserError(
        f"expected pip to find a wheel of torch {pin.version} for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}, found: {said}; "
        "check the network and pip's configuration, or give --wheel FILE"
    )


def open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as e:
        raise UserError(
            f"expected a wheel at {path}, found: {e}; give --wheel a torch-*.whl file"
        ) from e


def check_pin(path: Path, pin: Pin) -> None:
    """Raise unless the wheel is of the pinned version and commit, and for this Python."""
    with open_wheel(path) as wheel:
        try:
            text = wheel.read("torch/version.py").decode()
        except KeyError as e:
            raise UserError(
                f"expected a PyTorch wheel, found no torch/version.py in {path}; "
                "give --wheel a torch-*.whl file"
            ) from e
    values = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'$", text, re.MULTILINE))
    pin.check(
        values.get("__version__", "no version"),
        values.get("git_version", "no commit"),
        str(path),
    )
    if not re.fullmatch(rf"torch-[^-]+-{_PYTHON_TAG}-[^-]+-[^-]+\.whl", path.name):
        raise UserError(
            f"expected a wheel named torch-VERSION-{_PYTHON_TAG}-ABI-PLATFORM.whl, found "
            f"{path.name}; give --wheel one for this Python, under its own name"
        )


def python_files(path: Path, suffix: str = ".py") -> dict[str, bytes]:
    """The files that patches may edit, ``torch/**/*.py``, or those of another suffix."""
    with open_wheel(path) as wheel:
        return {
            name: wheel.read(name)
            for name in sorted(wheel.namelist())
            if name.startswith("torch/") and name.endswith(suffix)
        }


def local_version(version: str, build: int) -> str:
    """``2.13.0+cpu`` becomes ``2.13.0+cpu.rnn1``, ``2.13.0`` becomes ``2.13.0+rnn1``."""
    return f"{version}{'.' if '+' in version else '+'}rnn{build}"


def packed_name(path: Path, pin: Pin) -> str:
    _, version, tags = path.name.split("-", 2)
    return f"torch-{local_version(version, pin.build)}-{tags}"


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


class _Packer:
    """Writes a wheel; unchanged members are copied as they are, still compressed."""

    def __init__(self, source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
        self.source, self.target = source, target
        self.record: list[list[str]] = []

    def copy(self, info: zipfile.ZipInfo, name: str, record: list[str]) -> None:
        stream = self.source.fp
        assert stream is not None and self.target.fp is not None
        stream.seek(info.header_offset)
        lengths = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
        stream.seek(sum(lengths), os.SEEK_CUR)
        new = copy.copy(info)
        new.filename, new.extra = name, b""
        new.flag_bits &= ~0x08  # the sizes stand in the header, not behind the data
        new.header_offset = self.target.fp.tell()
        self.target.fp.write(new.FileHeader())
        left = info.compress_size
        while left:
            block = stream.read(min(left, 1 << 22))
            self.target.fp.write(block)
            left -= len(block)
        self.target.filelist.append(new)
        self.target.NameToInfo[name] = new
        self.target.start_dir = self.target.fp.tell()
        self.target._didModify = True  # type: ignore[attr-defined]
        self.record.append([name, *record])

    def write(self, name: str, data: bytes, recorded: bool = True) -> None:
        info = zipfile.ZipInfo(name, _MEMBER_TIME)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = 0o100644 << 16
        self.target.writestr(info, data)
        self.record.append(
            [name, _record_hash(data), str(len(data))] if recorded else [name, "", ""]
        )


def pack(source: Path, files: dict[str, bytes], pin: Pin, target: Path) -> None:
    """Write ``target``: the wheel ``source`` with ``files`` in place of its Python files.

    RECORD, METADATA and ``torch.version`` say what the wheel now is.  The same input
    gives the same bytes.  ``target`` appears only when it is whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".part")
    try:
        _write(source, files, pin, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _write(source: Path, files: dict[str, bytes], pin: Pin, target: Path) -> None:
    with open_wheel(source) as old, zipfile.ZipFile(target, "w") as new:
        (info_dir,) = {
            n.split("/")[0]
            for n in old.namelist()
            if n.split("/")[0].endswith(".dist-info")
        }
        version = info_dir.removeprefix("torch-").removesuffix(".dist-info")
        patched = local_version(version, pin.build)
        new_dir = f"torch-{patched}.dist-info"
        rows = csv.reader(io.StringIO(old.read(f"{info_dir}/RECORD").decode()))
        recorded = {row[0]: row[1:] for row in rows if row}
        replaced = dict(files)
        replaced["torch/version.py"] = files["torch/version.py"].replace(
            f"__version__ = '{version}'".encode(), f"__version__ = '{patched}'".encode()
        )
        metadata = old.read(f"{info_dir}/METADATA")
        replaced[f"{info_dir}/METADATA"] = metadata.replace(
            f"\nVersion: {version}\n".encode(), f"\nVersion: {patched}\n".encode(), 1
        )
        packer = _Packer(old, new)
        for info in old.infolist():
            if info.is_dir() or info.filename == f"{info_dir}/RECORD":
                continue
            name = info.filename.replace(f"{info_dir}/", f"{new_dir}/", 1)
            data = replaced.pop(info.filename, None)
            row = recorded[info.filename]
            if data is None or _record_hash(data) == row[0]:
                packer.copy(info, name, row)
            else:
                packer.write(name, data)
        for name in sorted(replaced):
            packer.write(name, replaced[name])
        record = f"{new_dir}/RECORD"
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [*packer.record, [record, "", ""]]
        )
        packer.write(record, out.getvalue().encode(), recorded=False)
