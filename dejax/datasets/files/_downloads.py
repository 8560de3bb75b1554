"""Files of data sets: in a folder of the user, or in a cache that downloads fill.

A download goes to a temporary file next to its place. It is checked (length, digest), unpacked into a temporary folder,
and then renamed, so that an interrupted download leaves no file that looks complete.

If the project knows the digest of a file, the file must match it. Otherwise the digest of the first download is written
next to the files (`digests.json`), and every later use of the cache and every later download must match that. This
protects against damage and silent change after the first download, not against a wrong first download.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dejax._files import cache_folder, is_full, replacing_folder
from dejax.datasets.files._work import Progress

DATA_VARIABLE = "DEJAX_DATA"
DIGESTS_FILE = "digests.json"
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30.0


class DataUnavailableError(OSError):
    """A data set is in none of the folders and could not be downloaded. The message says where to put its files.

    >>> import tempfile
    >>> from dejax.datasets import DataUnavailableError, load
    >>> try:
    ...     data = load("aifb", url="file:///nowhere.tgz", cache=tempfile.mkdtemp())
    ... except DataUnavailableError as error:  # its message says where to put the files
    ...     print("If you have its files, give their folder" in str(error))
    True
    """


@dataclass(frozen=True, slots=True)
class Archive:
    """A public .tgz archive and the files that are needed of it.

    Attributes:
        url: its address.
        files: base names of the members to keep; for each, the names that it may have in the archive.
        digests: known SHA-256 by kept name; the name "archive" stands for the archive itself.
    """

    url: str
    files: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]


def find_files(
    name: str, files: Mapping[str, Sequence[str]], folder: str | os.PathLike[str] | None
) -> dict[str, Path] | None:
    """The paths of a data set's files in `folder`, or in `$DEJAX_DATA`, or in a sub-folder `name` of either.

    Args:
        name: the name of the data set and of its sub-folder.
        files: the files that are needed: key -> the accepted file names, the preferred one first.
        folder: the user's folder. If it is given, `$DEJAX_DATA` is not tried.

    Returns:
        key -> path; None if no folder was given and `$DEJAX_DATA` does not have the files.

    Raises:
        FileNotFoundError: `folder` was given and lacks a file.
    """
    given = folder is not None
    base = folder if given else os.environ.get(DATA_VARIABLE)
    if not base:
        return None
    places = (Path(base) / name, Path(base))
    for place in places:
        found = _files_in(place, files)
        if len(found) == len(files):
            return found
    if not given:
        return None
    best = max((_files_in(place, files) for place in places), key=len)
    missing = ", ".join(" or ".join(names) for key, names in files.items() if key not in best)
    raise FileNotFoundError(
        f"folder must hold the files of {name!r}, or a sub-folder {name}/ that does: no {missing} in {Path(base)} "
        f"(there: {_listing(Path(base))})"
    )


def fetch(
    name: str, archive: Archive, *, cache: Path | None = None, force: bool = False, progress: bool | None = None
) -> dict[str, Path]:
    """The paths of a data set's files in the cache. Downloads them first if they are not there.

    Args:
        name: the name of the data set; its files go to `<cache>/datasets/<name>`.
        archive: its address and the files to keep.
        cache: `cache_folder()` by default.
        force: download again even if the files are there.
        progress: draw a bar; None draws on a terminal only.

    Raises:
        DataUnavailableError: the download failed; the message says how to give a folder instead.
        ValueError: the download, or the cache, does not have the expected digest.
        OSError: the drive of the cache is full.
    """
    home = (cache or cache_folder()) / "datasets" / name
    recorded = _read_digests(home)
    if not force and recorded is not None and all((home / file).is_file() for file in archive.files):
        for file in archive.files:
            expected = archive.digests.get(file) or recorded.get(file)
            _check_digest(home / file, expected, f"delete {home} to download it again")
        return {file: home / file for file in archive.files}
    with replacing_folder(home) as work:
        packed = work / "archive"
        _download(name, archive.url, packed, progress)
        digests = {"archive": sha256(packed)}
        remedy = f"nothing was kept; if the change is known and wanted, delete {home}"
        _check_digest(packed, archive.digests.get("archive") or (recorded or {}).get("archive"), remedy)
        _unpack(packed, work, archive)
        packed.unlink()
        for file in archive.files:
            _check_digest(work / file, archive.digests.get(file), remedy)
            digests[file] = sha256(work / file)
        (work / DIGESTS_FILE).write_text(json.dumps({"url": archive.url, **digests}, indent=2) + "\n")
    return {file: home / file for file in archive.files}


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_in(place: Path, files: Mapping[str, Sequence[str]]) -> dict[str, Path]:
    found = {}
    for key, names in files.items():
        for name in names:
            if (place / name).is_file():
                found[key] = place / name
                break
    return found


def _listing(place: Path) -> str:
    if not place.is_dir():
        return "no such folder"
    names = sorted(entry.name for entry in place.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "it is empty"


def _read_digests(home: Path) -> dict[str, str] | None:
    try:
        return json.loads((home / DIGESTS_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _check_digest(path: Path, expected: str | None, remedy: str) -> None:
    if expected is not None and (actual := sha256(path)) != expected:
        raise ValueError(f"{path.name} must have the SHA-256 digest {expected}, got {actual}; {remedy}")


def _download(name: str, url: str, path: Path, progress: bool | None) -> None:
    import http.client  # at the top of the file they would double the import time of dejax.datasets
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer, open(path, "wb") as file:
            length = answer.headers.get("Content-Length")
            total = int(length) if length else None
            with Progress(f"download {name}", total, unit="B", enabled=progress) as bar:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
            if total is not None and bar.count != total:
                raise http.client.IncompleteRead(b"", total - bar.count)
    except http.client.IncompleteRead as error:
        raise DataUnavailableError(_unavailable(name, url, f"the download broke off ({error})")) from error
    except urllib.error.HTTPError as error:
        reason = f"the server answered {error.code} {error.reason}"
        raise DataUnavailableError(_unavailable(name, url, reason)) from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        if is_full(error):
            raise
        text = str(getattr(error, "reason", None) or error)
        raise DataUnavailableError(_unavailable(name, url, text)) from error


def _unavailable(name: str, url: str, reason: str) -> str:
    return (
        f"cannot download {name!r} from {url}: {reason}. If you have its files, give their folder: "
        f"load({name!r}, folder=...) or the environment variable {DATA_VARIABLE}; "
        "load('stdlib') and synthetic(...) need no download"
    )


def _unpack(packed: Path, folder: Path, archive: Archive) -> None:
    """Writes the wanted members under their own names. Paths inside the archive are never followed."""
    wanted = {name: file for file, names in archive.files.items() for name in names}
    try:
        with tarfile.open(packed) as tar:
            for member in tar:
                file = wanted.get(Path(member.name).name)
                content = tar.extractfile(member) if file and member.isfile() else None
                if file and content is not None and not (folder / file).exists():
                    with content, open(folder / file, "wb") as out:
                        shutil.copyfileobj(content, out, _CHUNK)
    except (tarfile.TarError, EOFError, OSError) as error:
        if is_full(error):
            raise
        raise ValueError(f"{archive.url} is not a whole .tgz archive ({error}); nothing was kept") from error
    missing = [file for file in archive.files if not (folder / file).exists()]
    if missing:
        raise ValueError(f"{archive.url} has no {', '.join(missing)}; nothing was kept")
