"""Import records from other formats, and export them.

importers.py      the table of formats; opens a source, and loads it into a store
sources.py        the interface of a source: batches of records, and keys made from names
import_files.py   files in a folder, samples in tar archives, an LMDB environment: one record at a time
import_npz.py     the arrays of a ``.npz`` file, row by row
arrow.py          Parquet and Arrow files, and data sets of Hugging Face; a store as a Parquet file
"""
