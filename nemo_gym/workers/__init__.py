"""Work that may take for ever, in processes that can be killed: `pool` is the server's side, `loop` the other one."""
