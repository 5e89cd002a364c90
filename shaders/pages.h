// Pages of keys and values, as a shader reaches them: a page table is an array of GPU addresses.
#ifndef FERRUM_PAGES_H
#define FERRUM_PAGES_H

#include "common.h"
#include "ferrum_kv_layout.h"

struct ferrum_page {
    device half *data;
};

#endif
