"""Listeners in any network namespace of this host, which note whatever reaches them.

An attack sends its own name as its payload, so that a breach says which attack it was."""

import ctypes
import selectors
import socket
import threading

CLONE_NEWNET = 0x40000000


def within(netns, work):
    """Runs `work` in a thread that is in the network namespace of this file; None stands for this process's own."""
    outcome = []

    def run():
        try:
            if netns:
                with open(netns) as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns {netns}")
            outcome.append((work(), None))
        except Exception as error:  # handed to the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error:
        raise error
    return result


class Canary:
    """Takes TCP connections and datagrams on one port of every namespace that it was put into."""

    def __init__(self):
        self.selector, self.lock, self.seen = selectors.DefaultSelector(), threading.Lock(), []
        self.stopping = False
        self.port = None
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def put(self, place, netns=None):
        """`place` is what its notes say."""
        def sockets():
            made = []
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    one = socket.socket(socket.AF_INET6, kind)
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                    one.bind(("::", self.port or 0))
                except OSError:
                    one = socket.socket(socket.AF_INET, kind)
                    one.bind(("0.0.0.0", self.port or 0))
                if kind == socket.SOCK_STREAM:
                    one.listen(256)
                self.port = self.port or one.getsockname()[1]
                one.setblocking(False)
                made.append(one)
            return made

        for one in within(netns, sockets):
            kind = "listener" if one.type == socket.SOCK_STREAM else "datagram"
            self.selector.register(one, selectors.EVENT_READ, (place, kind))

    def start(self):
        self.thread.start()

    def _serve(self):
        while not self.stopping:
            for key, _ in self.selector.select(0.2):
                place, kind = key.data
                try:
                    if kind == "listener":
                        peer, _ = key.fileobj.accept()
                        peer.setblocking(False)
                        self._note(place, "tcp", "connected")
                        self.selector.register(peer, selectors.EVENT_READ, (place, "stream"))
                    elif kind == "datagram":
                        self._note(place, "udp", key.fileobj.recv(2048).decode("latin-1"))
                    else:
                        self._note(place, "tcp", key.fileobj.recv(2048).decode("latin-1"))
                        self.selector.unregister(key.fileobj)
                        key.fileobj.close()
                except OSError:
                    continue

    def _note(self, *event):
        with self.lock:
            self.seen.append(event)

    def events(self):
        """(place, protocol, payload) of each."""
        with self.lock:
            return list(self.seen)

    def forget(self):
        with self.lock:
            self.seen.clear()

    def stop(self):
        self.stopping = True
        if self.thread.is_alive():
            self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
