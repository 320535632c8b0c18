"""Ray Serve, imported without what its own models warn of."""

import os
import warnings

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401  its own models use a deprecated spelling of pydantic's Field
