"""
A compile cache as one file, so that a machine image or a fleet compiles once: a tar with its key in front.

What comes in is not believed: only plain files below one folder, bounded in size, each with the digest that the head
of the bundle gives, and a key that fits its own digest. That finds damage, not malice: who may write the bundle may
write programs that probes run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO

from checks.accelerators.neuron.cache import FORMAT, MANIFEST, CacheKey, CompileCache, to_key
from checks.json_text import parse_json

HEAD = "healthd-compile-cache.json"
FOLDER = "cache"
MAX_BYTES = 16 << 30
MAX_MEMBERS = 100_000
_MAX_HEAD_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 20


class BundleError(ValueError):
    """A bundle that is not taken; the text says what is wrong with it and what to do."""


def export_bundle(cache: CompileCache, path: Path) -> int:
    """
    Write a cache to a file, whole or not at all; how many files it has.

    Raises BundleError where nothing is compiled, and OSError.
    """
    if not cache.compiled():
        raise BundleError(f"{cache.folder}: nothing is compiled for this device; run 'healthd warm' first")
    files = [
        file
        for file in sorted(cache.folder.rglob("*"))
        if file.is_file() and not file.is_symlink() and file.suffix != ".lock"
    ]
    digests = {str(file.relative_to(cache.folder)): _digest(file) for file in files}
    head = json.dumps(
        {"format": FORMAT, "digest": cache.key.digest, "key": asdict(cache.key), "files": digests}
    ).encode()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
            tar.addfile(_member(HEAD, len(head)), io.BytesIO(head))
            for file in files:
                place = PurePosixPath(FOLDER, *file.relative_to(cache.folder).parts)
                with open(file, "rb") as content:
                    size = os.fstat(content.fileno()).st_size
                    tar.addfile(_member(str(place), size), content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return len(files)


def import_bundle(path: Path, root: Path, wanted: CacheKey | None) -> tuple[CompileCache, int]:
    """
    Put a bundle's cache below `root`, in the place of one that is there; the cache, and how many files it has.

    `wanted` is this host's key (None: not known, so nothing is compared). Raises BundleError and OSError; then what
    was there stays.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        # As it is written, and nothing else: read as LZMA, zeros are empty streams without end.
        with tarfile.open(path, mode="r:gz") as tar:
            key, digests = _head(tar)
            different = key.differences(wanted) if wanted is not None else []
            if different:
                raise BundleError(
                    f"{path} is for something else: {'; '.join(different)}; make one with 'healthd warm --export' on "
                    "a host like this"
                )
            folder = Path(tempfile.mkdtemp(dir=root, prefix=".import-"))
            try:
                _unpack(tar, folder)
                cache = CompileCache(root, key)
                _believe(folder, key, digests)
                _put(folder, cache.folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise BundleError(f"{path} is no bundle of healthd, or is cut off: {error}") from None
    return cache, len(digests)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member


def _head(tar: tarfile.TarFile) -> tuple[CacheKey, dict[str, str]]:
    """The key in front, and file -> SHA-256 of what must follow. Raises BundleError."""
    member = tar.next()
    content = tar.extractfile(member) if member is not None and member.isreg() and member.name == HEAD else None
    if member is None or content is None or member.size > _MAX_HEAD_BYTES:
        raise BundleError(f"no bundle of healthd: it does not begin with {HEAD}")
    try:
        said = parse_json(content.read(_MAX_HEAD_BYTES))
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise BundleError("a bundle of another format; make it with this version of healthd")
        key = to_key(said.get("key"))
    except ValueError as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"the head of the bundle makes no sense: {error}") from None
    if said.get("digest") != key.digest:
        raise BundleError("the key of the bundle does not fit its digest: it was changed or damaged")
    files = said.get("files")
    if not isinstance(files, dict):
        raise BundleError("the head of the bundle lists no files")
    return key, {str(name): str(digest) for name, digest in files.items()}


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Every further member into `folder`. Raises BundleError for what is no plain file below FOLDER."""
    count = total = 0
    while (member := tar.next()) is not None:
        parts = PurePosixPath(member.name).parts
        if member.isdir() and parts[:1] == (FOLDER,) and ".." not in parts:
            continue
        plain = member.isreg() and len(parts) > 1 and parts[0] == FOLDER and ".." not in parts
        if not plain or "\0" in member.name:
            raise BundleError(f"the bundle holds {member.name[:200]!r}, which is no plain file below {FOLDER}/")
        count, total = count + 1, total + member.size
        if count > MAX_MEMBERS or total > MAX_BYTES:
            raise BundleError(f"the bundle holds more than {MAX_MEMBERS} files or {MAX_BYTES >> 30} GiB")
        content = tar.extractfile(member)
        if content is None:
            raise BundleError(f"the bundle holds no content of {member.name[:200]!r}")
        place = folder.joinpath(*parts[1:])
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(content, place, member.size)


def _write(content: IO[bytes], place: Path, size: int) -> None:
    with open(place, "xb") as out:
        left = size
        while left > 0 and (part := content.read(min(left, _CHUNK_BYTES))):
            out.write(part)
            left -= len(part)
    if left:
        raise BundleError(f"the bundle is cut off in {place.name}")


def _digest(path: Path) -> str:
    hashed = hashlib.sha256()
    with open(path, "rb") as content:
        while part := content.read(_CHUNK_BYTES):
            hashed.update(part)
    return hashed.hexdigest()


def _believe(folder: Path, key: CacheKey, digests: Mapping[str, str]) -> None:
    """All files must be there as they were, and the manifest among them of the same key with something in it."""
    found = {str(path.relative_to(folder)): _digest(path) for path in folder.rglob("*") if path.is_file()}
    if found != digests:
        names = [name for name in {**digests, **found} if digests.get(name) != found.get(name)]
        raise BundleError(f"the bundle is damaged or cut off: {len(names)} files are not as they were, as {names[0]!r}")
    try:
        said = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        fits = to_key(said["key"]) == key and bool(said["entries"])
    except (OSError, ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise BundleError(f"the {MANIFEST} of the bundle is missing or of another key")


def _put(folder: Path, place: Path) -> None:
    """Move a folder to its place; what is there goes only when the new one is in."""
    old = place.with_name(f".old-{place.name}-{os.getpid()}")
    if place.exists():
        os.rename(place, old)
    try:
        os.rename(folder, place)
    except OSError:
        if old.exists():
            os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)
