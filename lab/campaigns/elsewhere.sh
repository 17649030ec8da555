# In place of ssh, for `pool_faults`: another host is this one under another name.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
