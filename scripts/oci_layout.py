#!/usr/bin/env python3
"""Writes a root filesystem, as a tar file, into an OCI image layout of one layer. Needs Python 3 and nothing else.

Equal inputs give equal bytes. Format: OCI image specification 1.0, "OCI Image Layout Specification".
"""

import argparse
import datetime
import gzip
import hashlib
import json
import os
import pathlib
import shutil

CHUNK = 1 << 20


class Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file):
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data):
        self.sha256.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


def store(blobs, data):
    """Stores bytes as a blob and returns their descriptor."""
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def store_layer(blobs, rootfs, compress):
    """Stores a tar file as a layer; returns its descriptor and its diff id."""
    diff_id, staging = hashlib.sha256(), blobs / ".layer"
    with open(rootfs, "rb") as source, open(staging, "wb") as file:
        stored = Hashed(file)
        # No name and no time in the gzip header: both would differ from build to build.
        sink = gzip.GzipFile("", "wb", 6, stored, 0) if compress else stored
        while chunk := source.read(CHUNK):
            diff_id.update(chunk)
            sink.write(chunk)
        if compress:
            sink.close()
    os.rename(staging, blobs / stored.sha256.hexdigest())
    media_type = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
    descriptor = {"mediaType": media_type, "digest": f"sha256:{stored.sha256.hexdigest()}", "size": stored.size}
    return descriptor, f"sha256:{diff_id.hexdigest()}"


def dump(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pairs(items):
    return dict(item.split("=", 1) for item in items)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rootfs", type=pathlib.Path, help="tar file of the root filesystem")
    parser.add_argument("layout", type=pathlib.Path, help="folder to make; it must not exist")
    parser.add_argument("--tag", default="latest")
    parser.add_argument("--created", type=int, default=0, help="seconds since 1970")
    parser.add_argument("--architecture", default="amd64")
    parser.add_argument("--gzip", action="store_true", help="compress the layer")
    parser.add_argument("--user", default="")
    parser.add_argument("--workdir", default="")
    for name in ("env", "cmd", "entrypoint", "label", "port"):
        parser.add_argument(f"--{name}", action="append", default=[])
    args = parser.parse_args()

    args.layout.mkdir(parents=True)
    try:
        write(args)
    except BaseException:
        shutil.rmtree(args.layout)
        raise


def write(args):
    blobs = args.layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer, diff_id = store_layer(blobs, args.rootfs, args.gzip)
    created = datetime.datetime.fromtimestamp(args.created, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    settings = {
        # Of several values of one variable the last.
        "Env": [f"{name}={value}" for name, value in pairs(args.env).items()],
        "Cmd": args.cmd,
        "Entrypoint": args.entrypoint,
        "User": args.user,
        "WorkingDir": args.workdir,
        "Labels": pairs(args.label),
        "ExposedPorts": {port: {} for port in args.port},
    }
    config = {
        "created": created,
        "architecture": args.architecture,
        "os": "linux",
        "config": {key: value for key, value in settings.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": created, "created_by": "oci_layout.py"}],
    }
    config_descriptor = {"mediaType": "application/vnd.oci.image.config.v1+json", **store(blobs, dump(config))}
    manifest_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": manifest_type, "config": config_descriptor, "layers": [layer]}
    entry = {
        "mediaType": manifest_type,
        **store(blobs, dump(manifest)),
        "platform": {"architecture": args.architecture, "os": "linux"},
        "annotations": {"org.opencontainers.image.ref.name": args.tag},
    }
    (args.layout / "oci-layout").write_bytes(dump({"imageLayoutVersion": "1.0.0"}))
    (args.layout / "index.json").write_bytes(dump({"schemaVersion": 2, "manifests": [entry]}))


if __name__ == "__main__":
    main()
