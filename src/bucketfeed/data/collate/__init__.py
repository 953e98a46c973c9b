"""From a list of samples to a batch: stacked, padded, packed or ragged.

>>> loader = bf.Loader(ds, batch_size=32, collate=bf.collate.pad(fields=("tokens",)))
"""

from bucketfeed.data.collate.buffers import Buffers as Buffers
from bucketfeed.data.collate.jagged import Ragged as Ragged
from bucketfeed.data.collate.jagged import ragged as ragged
from bucketfeed.data.collate.packing import pack as pack
from bucketfeed.data.collate.padding import Padded as Padded
from bucketfeed.data.collate.padding import pad as pad
from bucketfeed.data.collate.stacking import as_tensors as as_tensors
from bucketfeed.data.collate.stacking import default_collate as default_collate
from bucketfeed.data.collate.stacking import stack as stack
