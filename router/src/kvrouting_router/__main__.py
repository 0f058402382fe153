"""`python -m kvrouting_router`."""

from kvrouting_router.command import router

router(prog_name="kvrouting-router", auto_envvar_prefix="KVROUTING_ROUTER")
