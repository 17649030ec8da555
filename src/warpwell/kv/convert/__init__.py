"""Import records from other formats, and export them.

importers.py      the table of formats; opens a source, and loads it into a store
sources.py        the interface of a source: batches of records, and keys made from names
import_folder.py  a folder of files, or of images in a folder for each class
import_tar.py     samples in tar archives
import_arrow.py   Parquet and Arrow files, and data sets of Hugging Face
import_lmdb.py    an LMDB environment
import_npz.py     a ``.npz`` file
exporters.py      a store as a ``.npz`` file or a folder
"""
