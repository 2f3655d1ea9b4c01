"""A system-call filter as bubblewrap takes it: a compiled classic-BPF program.

Namespaces already hide files, processes and the network. The filter denies what they leave open: kernel interfaces a
program has no use for (debugging, keys, mounts, modules, io_uring), new namespaces, socket families outside network
namespaces (a virtual machine's vsock reaches its host), and memory that outlives its mapping and counts for no process
(System V, memfd, shared anonymous mappings, pages given to a pipe).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

_LD, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARG0_LOW, _ARG3_LOW = 0, 4, 16, 40
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20

# name -> number; what a table lacks does not exist on that machine
_X86_64 = {
    "acct": 163, "add_key": 248, "bpf": 321, "clock_settime": 227, "delete_module": 176, "fanotify_init": 300,
    "finit_module": 313, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "init_module": 175,
    "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "ioperm": 173, "iopl": 172, "kcmp": 312,
    "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "lookup_dcookie": 212, "mount": 165,
    "mount_setattr": 442, "move_mount": 429, "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428,
    "perf_event_open": 298, "personality": 135, "pidfd_getfd": 438, "pivot_root": 155, "process_vm_readv": 310,
    "process_vm_writev": 311, "ptrace": 101, "quotactl": 179, "quotactl_fd": 443, "reboot": 169, "request_key": 249,
    "setns": 308, "settimeofday": 164, "swapoff": 168, "swapon": 167, "syslog": 103, "umount2": 166, "unshare": 272,
    "userfaultfd": 323, "vhangup": 153, "chroot": 161, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64,
    "msgget": 68, "memfd_create": 319, "memfd_secret": 447, "vmsplice": 278,
}  # fmt: skip
_AARCH64 = {
    "acct": 89, "add_key": 217, "bpf": 280, "clock_settime": 112, "delete_module": 106, "fanotify_init": 262,
    "finit_module": 273, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "init_module": 105,
    "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "kcmp": 272, "kexec_file_load": 294,
    "kexec_load": 104, "keyctl": 219, "lookup_dcookie": 18, "mount": 40, "mount_setattr": 442, "move_mount": 429,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "open_tree": 428, "perf_event_open": 241, "personality": 92,
    "pidfd_getfd": 438, "pivot_root": 41, "process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117,
    "quotactl": 60, "quotactl_fd": 443, "reboot": 142, "request_key": 218, "setns": 268, "settimeofday": 170,
    "swapoff": 225, "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97, "userfaultfd": 282, "vhangup": 58,
    "chroot": 51, "shmget": 194, "shmctl": 195, "shmat": 196, "semget": 190, "msgget": 186, "memfd_create": 279,
    "memfd_secret": 447, "vmsplice": 75,
}  # fmt: skip
# machine -> AUDIT_ARCH, denied calls, numbers of clone, clone3, socket, socketpair, mmap
MACHINES = {
    "x86_64": (0xC000003E, _X86_64, (56, 435, 41, 53, 9)),
    "aarch64": (0xC00000B7, _AARCH64, (220, 435, 198, 199, 222)),
}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


def program(machine: str | None = None) -> bytes | None:
    """The filter for this machine; None where we have no table for it."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    arch, denied, (clone, clone3, socket_call, socketpair, mmap) = known
    deny = _ERRNO | errno.EPERM
    code: list[tuple[int, int, int, int]] = [
        (_LD, 0, 0, _ARCH),
        (_JEQ, 1, 0, arch),
        (_RET, 0, 0, _KILL),  # 32-bit calls have other numbers: a way around every rule below
        (_LD, 0, 0, _NR),
    ]
    if arch == 0xC000003E:
        code += [(_JGE, 0, 1, _X32), (_RET, 0, 0, _KILL)]
    for number in sorted(denied.values()):
        code += [(_JEQ, 0, 1, number), (_RET, 0, 0, deny)]
    # clone3 keeps its flags in memory, where a filter cannot look: "not there" makes libc use clone.
    code += [(_JEQ, 0, 1, clone3), (_RET, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [
        (_JEQ, 0, 4, clone),
        (_LD, 0, 0, _ARG0_LOW),
        (_JSET, 0, 1, _NEW_NAMESPACES),
        (_RET, 0, 0, deny),
        (_RET, 0, 0, _ALLOW),
    ]
    # Pages of a shared anonymous mapping stay when all but one page is unmapped: memory that no limit counts.
    code += [
        (_JEQ, 0, 5, mmap),
        (_LD, 0, 0, _ARG3_LOW),
        (_JSET, 0, 2, _MAP_ANONYMOUS),
        (_JSET, 0, 1, _MAP_SHARED),
        (_RET, 0, 0, deny),
        (_RET, 0, 0, _ALLOW),
    ]
    for call in (socket_call, socketpair):
        code += [(_JEQ, 0, 3 + len(_FAMILIES), call), (_LD, 0, 0, _ARG0_LOW)]
        for number, family in enumerate(_FAMILIES):
            code.append((_JEQ, len(_FAMILIES) - number, 0, int(family)))
        code += [(_RET, 0, 0, deny), (_RET, 0, 0, _ALLOW)]
    code.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
