"""`reasoning_gym`: procedural puzzles, scored by the reasoning-gym library.

The library knows more than a hundred kinds of tasks and how to score each. Some of its scorers
evaluate what the model wrote as Python or symbolic mathematics, which can run for ever or do harm: they are
called in processes apart, without access to anything, that are killed when they take too long.
"""

from typing import Any

from pydantic import ConfigDict, Field, field_validator

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from resources_servers.reasoning_gym.answers import extract_answer
