"""PUBLIC: the token ids of agents that do not know them: kept at the model server by call, and put together later.

A command-line agent talks to a model server as to any endpoint and reports only text. While it works, the server
keeps one `TokenEntry` per call (`records`), by way of a context variable (`sink`) into files (`store`) or wherever a
framework wants them (`protocols`). Afterwards the calls of a rollout are joined into the conversation they make
(`builder`), and its items get their ids back (`consumer`, `delivery`). Whatever is in doubt masks the rollout.
"""
