"""What all tests share."""

from __future__ import annotations

import signal

# A shell without job control starts what runs in the background with SIGINT ignored, and so would be every
# process that a test starts, to interrupt it. What is handled here is at its default in them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
