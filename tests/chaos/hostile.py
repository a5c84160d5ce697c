"""Runs as root inside a sandbox: sends to whatever its plan names, honestly and with forged frames.

    hostile.py PLAN      prints {"tcp": [names of what accepted a connection], "errors": number}

Everything that it sends holds the attack's name."""

import json
import resource
import select
import socket
import struct
import sys
import time

IPV4, VLAN, IPV6, ARP = 0x0800, 0x8100, 0x86DD, 0x0806
UDP, IPIP = 17, 4


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(source, target, payload, protocol=UDP, options=b"", fragment=0):
    words = 5 + len(options) // 4
    head = struct.pack(
        ">BBHHHBBH4s4s", 0x40 | words, 0, words * 4 + len(payload), 0x5AFE, fragment, 64, protocol, 0,
        socket.inet_aton(source), socket.inet_aton(target),
    ) + options
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + payload


def udp(port, text, check=0):
    data = text.encode()
    return struct.pack(">HHHH", 40000, port, 8 + len(data), check) + data


def ip6(source, target, port, text):
    addresses = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, target)
    datagram = udp(port, text)
    sum_of = checksum(addresses + struct.pack(">IHBB", len(datagram), 0, 0, UDP) + datagram)
    return struct.pack(">IHBB", 6 << 28, len(datagram), UDP, 64) + addresses + udp(port, text, sum_of)


def forged(plan):
    """(name, destination MAC, source MAC, type, payload) of each frame."""
    own, mac, gateway, site, port = plan["own"], plan["mac"], plan["gateway_mac"], plan["site"], plan["port"]
    to = lambda name, source, target=site, **more: (name, gateway, mac, IPV4, ip(source, target, udp(port, name), **more))
    yield to("honest frame", own)
    for source in plan["sources"]:
        yield to(f"source {source}", source)
    name = "forged mac"
    yield name, gateway, "02:ae:00:00:00:99", IPV4, ip(own, site, udp(port, name))
    name = "tagged frame"
    tagged = struct.pack(">HH", 1, IPV4) + ip(plan["sources"][0], site, udp(port, name))
    yield name, gateway, mac, VLAN, tagged
    name = "fragments"
    whole = udp(port, name * 3)
    yield name, gateway, mac, IPV4, ip(plan["sources"][0], site, whole[:16], fragment=0x2000)
    yield name, gateway, mac, IPV4, ip(plan["sources"][0], site, whole[16:], fragment=2)
    for target in plan["hosts"]:
        yield to(f"frame to {target}", own, target)
        # A loose source route by way of the gateway.
        route = b"\x83\x07\x04" + socket.inet_aton(target) + b"\0"
        yield to(f"source route to {target}", own, plan["gateway"], options=route)
        name = f"tunnel to {target}"
        inner = ip(own, target, udp(port, name))
        yield name, gateway, mac, IPV4, ip(own, plan["gateway"], inner, protocol=IPIP)
        name = f"broadcast frame to {target}"
        yield name, "ff:ff:ff:ff:ff:ff", mac, IPV4, ip(own, target, udp(port, name))
    for target in plan["hosts6"]:
        name = f"ipv6 to {target}"
        yield name, gateway, mac, IPV6, ip6("fe80::ae:15", target, port, name)
    # Claims, unasked, that the gateway and the other end are this guest's card.
    for claimed in (plan["gateway"], own, *plan["hosts"][:2]):
        card = bytes.fromhex("02ae00000099")
        answer = struct.pack(">HHBBH6s4s6s4s", 1, IPV4, 6, 4, 2, card, socket.inet_aton(claimed), card, socket.inet_aton(own))
        yield "arp", "ff:ff:ff:ff:ff:ff", mac, ARP, answer


def send_frames(plan):
    errors = 0
    card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    card.bind(("eth0", 0))
    pack = lambda mac: bytes.fromhex(mac.replace(":", ""))
    for _, target, source, kind, payload in forged(plan):
        try:
            card.send(pack(target) + pack(source) + struct.pack(">H", kind) + payload)
        except OSError:
            errors += 1
    return errors


def main():
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    errors = send_frames(plan)
    poll, waiting, reached = select.poll(), {}, []
    for name, address, port in plan["tcp"]:
        one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)
        try:
            one.connect((address, port))
        except BlockingIOError:
            pass
        except OSError:
            errors += 1
            continue
        waiting[one.fileno()] = (name, one)
        poll.register(one, select.POLLOUT)
    for name, address, port in plan["udp"]:
        one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        try:
            one.sendto(name.encode(), (address, port))
        except OSError:
            errors += 1
    end = time.monotonic() + plan["seconds"]
    while waiting and time.monotonic() < end:
        for number, _ in poll.poll(200):
            name, one = waiting.pop(number)
            poll.unregister(number)
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                one.send(name.encode())
                reached.append(name)
    print(json.dumps({"tcp": reached, "errors": errors}))


main()
