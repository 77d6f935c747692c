"""The pinned wheel: found, checked, and packed again with the series applied."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .console import UserError
from .pin import Pin


# A fixed time for the members that are written anew, so that packing is reproducible.
_MEMBER_TIME = (2026, 1, 1, 0, 0, 0)
_LOCAL_HEADER = struct.Struct("<26xHH")
_PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def _cached(version: str, cache: Path) -> Path | None:
    cache.mkdir(parents=True, exist_ok=True)
    found = sorted(cache.glob(f"torch-{version}[+-]*-{_PYTHON_TAG}-*.whl"))
    return next(
        (p for p in found if p.name.split("-")[1].split("+")[0] == version), None
    )


def _pip(
    version: str, *args: str
) -> Iterator[tuple[subprocess.CompletedProcess[str], str]]:
    """Run pip for the CPU build of a release and then for any, and give the results.

    Raises when the caller took neither.
    """
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"expected pip in {sys.executable}, found none; install it (on Debian: "
            "apt-get install python3-pip) or give --wheel FILE"
        )
    for wanted in (f"{version}+cpu", version):
        result = subprocess.run(
            [sys.executable, "-m", "pip", *args, "--no-deps", "--quiet"]
            + ["--disable-pip-version-check", f"torch=={wanted}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        yield result, wanted
    said = " ".join(result.stderr.split()[-30:])
    raise UserError(
        f"expected pip to find a wheel of torch {version} for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}, found: {said}; "
        "check the network and pip's configuration, or give --wheel FILE"
    )


def obtain(version: str, cache: Path) -> Path:
    """Download a release's wheel with the user's own pip configuration, once."""
    if path := _cached(version, cache):
        return path
    with tempfile.TemporaryDirectory(dir=cache) as aside:
        for _ in _pip(version, "download", "--dest", aside):
            for path in Path(aside).glob("*.whl"):
                return path.replace(cache / path.name)
    raise AssertionError("_pip raises")


class _Remote(io.RawIOBase):
    """A file behind an address, read in parts."""

    def __init__(self, url: str) -> None:
        self.url, self.position = url, 0
        self.size = int(self._get(0, 0)[1].rsplit("/", 1)[1])

    def _get(self, first: int, last: int) -> tuple[bytes, str]:
        part = urllib.request.Request(
            self.url, headers={"Range": f"bytes={first}-{last}"}
        )
        try:
            with urllib.request.urlopen(part, timeout=60) as answer:
                if answer.status != 206:
                    raise UserError(
                        f"expected {self.url} in parts, found that its server gives all "
                        "of it only; download it and give --wheel FILE"
                    )
                return answer.read(), answer.headers["Content-Range"]
        except urllib.error.URLError as e:
            raise UserError(
                f"expected to read {self.url}, found: {e}; check the network, or "
                "download it and give --wheel FILE"
            ) from e

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}
        self.position = start[whence] + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        data = self._get(self.position, last)[0]
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def obtain_python(version: str, cache: Path) -> Path:
    """A release's wheel, or a wheel of its Python files only where that saves a download.

    A wheel that pip finds on this machine is used where it is.  One behind an address is
    read in parts.
    """
    light = cache / "python-only"
    if path := _cached(version, cache) or _cached(version, light):
        return path
    report = ("install", "--dry-run", "--ignore-installed", "--report", "-")
    for result, _ in _pip(version, *report):
        if result.returncode:
            continue
        url = json.loads(result.stdout)["install"][0]["download_info"]["url"]
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.request.url2pathname(parts.path))
        if parts.scheme == "file":
            return path
        with tempfile.TemporaryDirectory(dir=light) as aside:
            target = Path(aside) / path.name
            copy_python(url, target)
            return target.replace(light / path.name)
    raise AssertionError("_pip raises")


def copy_python(url: str, target: Path) -> None:
    """Write a wheel that has the Python files of the one at ``url``, and no others."""
    remote = io.BufferedReader(_Remote(url), 1 << 20)
    with zipfile.ZipFile(remote) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            if info.filename.startswith("torch/") and info.filename.endswith(".py"):
                new.writestr(info, old.read(info))


def open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as e:
        raise UserError(
            f"expected a wheel at {path}, found: {e}; give --wheel a torch-*.whl file"
        ) from e


def release(path: Path) -> tuple[str, str]:
    """The version, without its local part, and the upstream commit of a wheel."""
    version, commit = _release(path)
    return version.split("+")[0], commit


def _release(path: Path) -> tuple[str, str]:
    with open_wheel(path) as wheel:
        try:
            text = wheel.read("torch/version.py").decode()
        except KeyError as e:
            raise UserError(
                f"expected a PyTorch wheel, found no torch/version.py in {path}; "
                "give --wheel a torch-*.whl file"
            ) from e
    values = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'$", text, re.MULTILINE))
    return (
        values.get("__version__", "no version"),
        values.get("git_version", "no commit"),
    )


def check_pin(path: Path, pin: Pin) -> None:
    """Raise unless the wheel is of the pinned version and commit, and for this Python."""
    pin.check(*_release(path), str(path))
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
    """Named by what ``torch.__version__`` says: a CUDA build's wheel leaves +cu130 out."""
    tags = path.name.split("-", 2)[2]
    return f"torch-{local_version(_release(path)[0], pin.build)}-{tags}"


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
        said = _release(source)[0]
        patched = local_version(said, pin.build)
        new_dir = f"torch-{patched}.dist-info"
        rows = csv.reader(io.StringIO(old.read(f"{info_dir}/RECORD").decode()))
        recorded = {row[0]: row[1:] for row in rows if row}
        replaced = dict(files)
        replaced["torch/version.py"] = files["torch/version.py"].replace(
            f"__version__ = '{said}'".encode(), f"__version__ = '{patched}'".encode()
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
