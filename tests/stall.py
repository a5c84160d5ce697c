"""A folder on a filesystem that stalls when it is told: what a network filesystem does whose server is away.

As a module: `Stalling`, for tests. As a script: the filesystem, which passes everything on to another folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path


class Stalling:
    """`folder` shows `behind`, until it is stalled: then each call waits."""

    def __init__(self, folder, behind, wait_for):
        self.folder = Path(folder)
        self.folder.mkdir()
        self.process = subprocess.Popen([sys.executable, __file__, str(folder), str(behind)])
        wait_for("the mount", lambda: os.path.ismount(self.folder), 30)

    def stall(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.go_on()
        subprocess.run(["umount", "-l", self.folder], check=False)
        self.process.wait(timeout=30)


def main(folder, behind):
    import mfusepy

    class Through(mfusepy.Operations):
        use_ns = True

        def at(self, path):
            return behind + path

        def getattr(self, path, fh=None):
            found = os.fstat(fh) if fh is not None else os.lstat(self.at(path))
            names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
            times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
            return {**{name: getattr(found, name) for name in names}, **times}

        def readdir(self, path, _fh):
            return [".", "..", *os.listdir(self.at(path))]

        def open(self, path, flags):
            # The kernel has taken care of these.
            return os.open(self.at(path), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))

        def create(self, path, mode, _fi=None):
            return os.open(self.at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def read(self, _path, size, offset, fh):
            return os.pread(fh, size, offset)

        def write(self, _path, data, offset, fh):
            return os.pwrite(fh, data, offset)

        def truncate(self, path, length, _fh=None):
            os.truncate(self.at(path), length)

        def release(self, _path, fh):
            os.close(fh)

        def flush(self, _path, _fh):
            pass

        def fsync(self, _path, _datasync, fh):
            os.fsync(fh)

        def fsyncdir(self, _path, _datasync, _fh):
            pass

        def mkdir(self, path, mode):
            os.mkdir(self.at(path), mode)

        def rmdir(self, path):
            os.rmdir(self.at(path))

        def unlink(self, path):
            os.unlink(self.at(path))

        def rename(self, old, new):
            os.rename(self.at(old), self.at(new))

        def link(self, target, source):
            os.link(self.at(source), self.at(target))

        def chmod(self, path, mode):
            os.chmod(self.at(path), mode)

        def chown(self, path, uid, gid):
            os.chown(self.at(path), uid, gid)

        def utimens(self, path, times=None):
            os.utime(self.at(path), ns=times)

    mfusepy.FUSE(Through(), folder, foreground=True, nothreads=False, allow_other=True)


if __name__ == "__main__":
    main(sys.argv[1], os.path.realpath(sys.argv[2]))
