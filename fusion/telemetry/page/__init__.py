"""Write the report of runs as one HTML file, which needs neither a server nor a network.

    run folder ──► read_run ──► curves, card_time, distributions, examples, settings, cautions ──► data of a run
                   (streams                            (pure)                                       (plain JSON)
                    its files)                                                                          │
    several runs: side by side in one file                                                              ▼
    assets/*.js, page.css, uplot/ ───────────────────────────────────────────────────► document.render ──► report.html

The data is untrusted: it is escaped JSON, the page writes it as text only, and its Content-Security-Policy allows no
script but its own and no request at all."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
