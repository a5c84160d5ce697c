"""Files through the SDK, in the details that only a whole path shows."""

import pytest
from conftest import wait_for
from e2b import FileNotFoundException, FilesystemEventType, FileType, NotFoundException, SandboxException


@pytest.fixture
def folder(shared, request):
    """A folder of the test's own in the shared sandbox, relative to the home."""
    name = request.node.name.split("[")[0]
    assert shared.files.make_dir(name)
    yield name
    shared.files.remove(name)


@pytest.mark.compat("python", "files.write", "files.write_files", "files.read")
def test_contents(shared, folder):
    files = shared.files
    written = files.write(f"{folder}/new/deep/a.txt", "longer than after")
    assert (written.name, written.path, written.type) == ("a.txt", f"/home/user/{folder}/new/deep/a.txt", FileType.FILE)
    assert not written.metadata
    files.write(f"{folder}/new/deep/a.txt", "short")
    assert files.read(f"{folder}/new/deep/a.txt") == "short"
    text = "Grüße, 世界\n" * 5000
    files.write(f"{folder}/zipped", text, gzip=True)
    assert files.read(f"{folder}/zipped") == files.read(f"{folder}/zipped", gzip=True) == text
    files.write(f"{folder}/empty", "")
    assert files.read(f"{folder}/empty") == "" and files.read(f"{folder}/empty", format="bytes") == b""
    assert files.write_files([]) == []
    names = [f"{folder}/{n}" for n in ["z", "a", "m/n"]]
    many = files.write_files([{"path": name, "data": name} for name in names])
    assert [entry.path for entry in many] == [f"/home/user/{name}" for name in names]
    assert [files.read(name) for name in names] == names
    for format in ["text", "stream"]:
        with pytest.raises(FileNotFoundException):
            files.read(f"{folder}/missing", format=format)
    # A download that is given up hurts no later call.
    files.write(f"{folder}/big", b"x" * 3_000_000)
    next(iter(files.read(f"{folder}/big", format="stream")))
    assert files.read(f"{folder}/z") == f"{folder}/z"


@pytest.mark.compat("python", "files.get_info", "files.rename")
def test_metadata_and_entries(shared, folder):
    files = shared.files
    for octet_stream in [True, False]:
        path = f"{folder}/noted-{octet_stream}"
        files.write(path, "data", metadata={"Author": "me"}, use_octet_stream=octet_stream)
        assert files.get_info(path).metadata == {"author": "me"}
    assert files.rename(path, f"{folder}/moved").metadata == {"author": "me"}
    assert {entry.name: entry.metadata for entry in files.list(folder)}["moved"] == {"author": "me"}
    files.write(f"{folder}/moved", "data")
    info = files.get_info(f"{folder}/moved")
    assert not info.metadata
    assert (info.type, info.size, info.mode, info.permissions) == (FileType.FILE, 4, 0o644, "-rw-r--r--")
    assert (info.owner, info.group) == ("user", "user") and info.modified_time.tzinfo
    whole = files.get_info(folder)
    assert (whole.type, whole.mode, whole.permissions) == (FileType.DIR, 0o755, "drwxr-xr-x") and whole.size > 0
    shared.commands.run(f"ln -s moved {folder}/link; python3 -Sc \"import os; os.setxattr('{folder}/moved', 'user.e2b.seen', b'inside')\"")
    link = files.get_info(f"{folder}/link")
    assert (link.type, link.symlink_target) == (FileType.FILE, f"/home/user/{folder}/moved")
    assert files.get_info(f"{folder}/moved").metadata == {"seen": "inside"}


@pytest.mark.compat("python", "files.list", "files.make_dir", "files.remove", "files.exists")
def test_trees(shared, folder):
    files = shared.files
    assert files.make_dir(f"{folder}/sub1/sub1_1") and files.make_dir(f"{folder}/sub2")
    assert not files.make_dir(f"{folder}/sub1")
    files.write_files([{"path": f"{folder}/{name}", "data": ""} for name in ["file1.txt", "sub1/sub1_1/deep.txt", "sub2/two.txt"]])

    def tree(**options):
        return [entry.path.removeprefix(f"/home/user/{folder}/") for entry in files.list(folder, **options)]

    assert tree() == tree(depth=1) == ["file1.txt", "sub1", "sub2"]
    assert tree(depth=2) == ["file1.txt", "sub1", "sub1/sub1_1", "sub2", "sub2/two.txt"]
    assert tree(depth=3) == tree(depth=9) == ["file1.txt", "sub1", "sub1/sub1_1", "sub1/sub1_1/deep.txt", "sub2", "sub2/two.txt"]
    files.remove(f"{folder}/sub1")
    files.remove(f"{folder}/sub1")
    assert files.exists(f"{folder}/sub2") and not files.exists(f"{folder}/sub1")
    with pytest.raises(NotFoundException):
        files.rename(f"{folder}/sub1", f"{folder}/sub3")
    with pytest.raises(NotFoundException):
        files.list(f"{folder}/sub1")


@pytest.mark.compat("python", "files.watch_dir")
def test_watches(shared, folder):
    files = shared.files
    watch = files.watch_dir(folder, recursive=True, include_entry=True)

    def events(enough):
        seen = []
        wait_for("events", lambda: seen.extend(watch.get_new_events()) or enough(seen))
        return seen

    files.write(f"{folder}/new", "data")
    seen = events(lambda seen: any(event.type == FilesystemEventType.WRITE for event in seen))
    assert [event.type for event in seen] == [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
    assert {event.name for event in seen} == {"new"} and seen[-1].entry.size == 4
    files.make_dir(f"{folder}/nested")
    events(lambda seen: any(event.name == "nested" for event in seen))
    files.write(f"{folder}/nested/file", "data")
    events(lambda seen: ("nested/file", FilesystemEventType.WRITE) in [(event.name, event.type) for event in seen])
    watch.stop()
    with pytest.raises(SandboxException):
        files.watch_dir(f"{folder}/new")
    with pytest.raises(NotFoundException):
        files.watch_dir(f"{folder}/missing")
