/* What the parts of the fake driver share. */
#ifndef WW_FAKE_H
#define WW_FAKE_H

/* A call that the fake does not have: NOT_SUPPORTED, and a line in the file FAKE_LOG names. */
int fake_absent(const char *symbol);

#endif
