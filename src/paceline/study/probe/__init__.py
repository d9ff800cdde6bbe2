"""What ``paceline check`` measures: one job with ranks on every host, ``-m paceline.study.probe``.

Each module measures one thing and gives classes of cost.machine; run.py goes through them, hosts
side by side where they don't disturb each other, and sends all to the launcher."""
