"""One offline HTML page of a run: `python -m paravt_jax.view RUN_DIR`.

`figures` reads metrics, `episodes` reads episodes, `page` puts both into one file. What a model wrote reaches the page
as data only: it is escaped there, shown as text, and a content security policy forbids whatever is not ours.
"""
