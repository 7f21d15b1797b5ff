"""One offline HTML page of a run or of two: `python -m paravt_jax.view RUN_DIR [OTHER]`.

`figures` reads metrics, `cells` an evaluation's certificates, `records` finds episodes, `episodes` says what is shown
of one, `pictures` decodes what it looked at, and `page` puts all into one file with the scripts that draw it. What a
model wrote reaches the page as data only: it is escaped there, shown as text, and a content security policy forbids
whatever is not ours.
"""
