"""The measuring job of ``paceline check``, with ranks on every host: ``-m paceline.study.probe``.

Each module in ``measure`` measures one quantity and returns dataclasses of cost.machine.
__main__.py runs the measurements, on several hosts in parallel where these do not disturb each
other, and sends the results to the launcher.
"""
