import os, socket, struct, time

IP, IPV6, TCP, UDP, SOL = socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.SOL_SOCKET
NETLINK, PACKET, ICMPV6, RAW = 270, 263, 58, 255
# Of each kind of socket: the level of an option, its number, and the value to which it is set.
ALL = [
    (SOL, 6, 1), (SOL, 9, 1), (SOL, 10, 1), (SOL, 12, 4), (SOL, 13, struct.pack('ii', 1, 12)), (SOL, 18, 9),
    (SOL, 35, 1), (SOL, 36, 7), (SOL, 37, 0x18), (SOL, 40, 1), (SOL, 45, 1), (SOL, 46, 50), (SOL, 47, 1_000_000),
    (SOL, 69, 1), (SOL, 72, 2), (SOL, 74, 0), (SOL, 5, 1), (SOL, 42, 3), (SOL, 60, 1), (SOL, 61, struct.pack('II', 1, 2)),
]
IPV4 = [
    (IP, 1, 0x10), (IP, 2, 77), (IP, 6, 1), (IP, 7, 1), (IP, 8, 1), (IP, 10, 2), (IP, 11, 1), (IP, 12, 1), (IP, 13, 1),
    (IP, 15, 1), (IP, 18, 1), (IP, 19, 1), (IP, 20, 1), (IP, 21, 3), (IP, 24, 1), (IP, 26, 1),
    (IP, 34, 0), (IP, 49, 0), (IP, 51, struct.pack('I', 50000 << 16 | 40000)),
]
OF_DATAGRAMS = [(IP, 25, 1), (IP, 32, 0x0100007f), (IP, 33, 5)]
IPV6_ONLY = [
    (IPV6, 16, 33), (IPV6, 19, 0), (IPV6, 23, 2), (IPV6, 25, 1), (IPV6, 29, 0), (IPV6, 31, 1), (IPV6, 33, 1),
    (IPV6, 49, 1), (IPV6, 51, 1), (IPV6, 53, 1), (IPV6, 56, 1), (IPV6, 58, 1), (IPV6, 60, 1), (IPV6, 62, 1), (IPV6, 66, 1),
    (IPV6, 67, 0x20), (IPV6, 70, 0), (IPV6, 72, 2), (IPV6, 73, 2), (IPV6, 74, 1), (IPV6, 75, 1), (IPV6, 77, 1), (IPV6, 78, 1),
]
OF_TCP = [
    (TCP, 1, 1), (TCP, 4, 77), (TCP, 5, 7), (TCP, 6, 5), (TCP, 7, 3), (TCP, 8, 11), (TCP, 13, b'reno'), (TCP, 16, 1),
    (TCP, 18, 20000), (TCP, 25, 16384), (TCP, 27, 1), (TCP, 36, 1), (TCP, 37, 1000), (TCP, 44, 5000), (TCP, 45, 150000),
    (TCP, 46, 30000),
]
OF_LISTENER = [(SOL, 49, 1), (TCP, 2, 1000), (TCP, 9, 9), (TCP, 10, 50000), (TCP, 23, 16), (TCP, 34, 1)]
OF_DATAGRAMS_6 = [(IPV6, 18, 4)]
OF_UDP = [(UDP, 101, 1), (UDP, 102, 1), (UDP, 103, 1200), (UDP, 104, 1)]
OF_UNIX = [(SOL, 16, 1), (SOL, 34, 1), (SOL, 76, 1), (SOL, 83, 0)]
OF_NETLINK = [(NETLINK, number, 1) for number in (3, 4, 5, 8, 10, 11, 12)]
OF_PACKET = [(PACKET, number, 1) for number in (8, 9, 17, 20, 23)]
OF_RAW = [(IP, 3, 1), (IP, 22, 1), (RAW, 1, 0x55)]
OF_RAW_6 = [(IPV6, 36, 1), (ICMPV6, 1, bytes(range(32)))]

def new(options, *kind):
    try:
        made = socket.socket(*kind)
    except OSError:
        return
    # For the restore, which follows soon.
    made.setsockopt(SOL, socket.SO_REUSEADDR, 1)
    sockets.append((made, options))
    return made

sockets = []
accepting = new(ALL + IPV4 + OF_TCP + OF_LISTENER, socket.AF_INET, socket.SOCK_STREAM)
accepting.bind(('127.0.0.1', 0))
accepting.listen(37)
connected = new(ALL + IPV4 + OF_TCP, socket.AF_INET, socket.SOCK_STREAM)
connected.connect(accepting.getsockname())
sockets.append((accepting.accept()[0], ALL + IPV4 + OF_TCP))
closed = new(ALL + IPV4 + OF_TCP, socket.AF_INET, socket.SOCK_STREAM)
udp = new(ALL + IPV4 + OF_DATAGRAMS + OF_UDP, socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('127.0.0.1', 0))
lite = new(ALL + IPV4 + OF_DATAGRAMS + [(136, 10, 20), (136, 11, 24)], socket.AF_INET, socket.SOCK_DGRAM, 136)
accepting6 = new(ALL + IPV4 + IPV6_ONLY + OF_TCP + OF_LISTENER, socket.AF_INET6, socket.SOCK_STREAM)
if accepting6:
    accepting6.bind(('::', 0))
    accepting6.listen(3)
udp6 = new(ALL + IPV4 + IPV6_ONLY + OF_DATAGRAMS + OF_DATAGRAMS_6 + OF_UDP, socket.AF_INET6, socket.SOCK_DGRAM)
new(ALL + IPV4 + OF_DATAGRAMS + OF_RAW, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
new(ALL + IPV6_ONLY + OF_DATAGRAMS_6 + OF_RAW_6, socket.AF_INET6, socket.SOCK_RAW, ICMPV6)
new(ALL + OF_UNIX, socket.AF_UNIX, socket.SOCK_DGRAM)
new(ALL + OF_UNIX, socket.AF_UNIX, socket.SOCK_STREAM)
new(ALL + OF_NETLINK, socket.AF_NETLINK, socket.SOCK_RAW, 0)
new(ALL + OF_PACKET, socket.AF_PACKET, socket.SOCK_RAW)

# A group of each kind of address, on the interface with the number 1.
GROUP = socket.inet_aton('239.9.9.9') + struct.pack('II', 0, 1)
GROUP_6 = socket.inet_pton(socket.AF_INET6, 'ff05::1234') + struct.pack('I', 1)
GROUPS = [(udp, IP, 35, 36, GROUP), (udp6, IP, 35, 36, GROUP), (udp6, IPV6, 20, 21, GROUP_6)]
for made, level, join, _, group in GROUPS:
    if made:
        made.setsockopt(level, join, group)

def is_member(made, level, join, leave, group):
    try:
        made.setsockopt(level, leave, group)
    except OSError:
        return False
    made.setsockopt(level, join, group)
    return True

def read(made, level, option):
    try:
        return made.getsockopt(level, option, 64).hex()
    except OSError as error:
        return 'none'

# The new values of some change others: what counts is what is there in the end.
fresh = [[read(made, level, option) for level, option, _ in options] for made, options in sockets]
for made, options in sockets:
    for level, option, value in options:
        try:
            made.setsockopt(level, option, value)
        except OSError:
            pass

for number in range(1000):
    while not os.path.exists(f'ask.{number}'):
        time.sleep(0.002)
    with open('seen.new', 'w') as file:
        for index, (made, options) in enumerate(sockets):
            for (level, option, _), default in zip(options, fresh[index]):
                value = read(made, level, option)
                is_set = 'as it was' if value == default else 'set'
                print(f'socket {index}: option {level}/{option} {is_set}: {value}', file=file)
        for group in GROUPS:
            if group[0]:
                print('group', group[4].hex(), is_member(*group), file=file)
    os.rename('seen.new', f'seen.{number}')
