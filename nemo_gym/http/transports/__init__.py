"""How a request reaches a server: in memory, over bare connections, or with aiohttp."""
