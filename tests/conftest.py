"""What every test can rely on."""

import signal

# A runner started in the background ignores Ctrl-C, and so would every process that the tests start from it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
