"""SGLang's entry point `sglang.srt.plugins` -> `dsv4ctl`: what every SGLang process of this installation calls.

Without the control plane's variable in the environment it returns at once and has imported nothing: SGLang with the
package installed but not asked for is SGLang as it is.
"""

import os

#: `protocol.ENGINE_VARIABLE`, by value: importing that module is what must not happen.
ENGINE_VARIABLE = "DSV4CTL_ENGINE"


def register() -> None:
    """Registers the hooks of the installed release in a scheduler process.

    SGLang logs what a plugin raises and serves unpatched. So whatever is wrong ends the process: SystemExit is no
    Exception, and passes.
    """
    if ENGINE_VARIABLE not in os.environ:
        return
    from dsv4ctl.engine_adapters.sglang import install

    install.install(os.environ[ENGINE_VARIABLE])
