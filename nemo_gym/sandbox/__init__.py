"""Running what a model wrote without trusting it.

    pool.py         the server's side: a bounded number of isolated processes, and calls to them
    process.py      one of them: started, asked, killed
    wire.py         what the two sides say to each other
    zygote.py       the other side: confined once, it forks a child for every call
    child.py        that child: its limits, its streams, its result
    confine.py      the order in which the layers are put on
    namespaces.py   a file system, a network and process numbers of its own
    landlock.py     which files may be opened
    seccomp.py      which system calls may be made
    kernel.py       system calls that Python has no function for

Needs no privileges, no helper program and no library: Linux offers all of it to ordinary processes.
"""
