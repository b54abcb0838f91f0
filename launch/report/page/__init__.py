"""``maingrad report``: one HTML page about one run, or about several runs side by side.

Imports ``launch/report``, ``launch/plan``, ``launch/training``'s records and ``launch/config``. Jinja fills in
``page.html.j2``.
"""
