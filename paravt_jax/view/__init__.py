"""Writes one offline HTML page about one or more runs: `python -m paravt_jax.view RUN_DIR…`.

`figures` reads metrics, `cells` reads an evaluation's certificates, `records` finds episodes, `episodes` converts them
for the page, `pictures` decodes the frames they used, and `page` writes everything into one file with the scripts that
draw it. Model output reaches the page as escaped data and is shown as text only. A content security policy blocks all
other scripts, styles and network access.
"""
