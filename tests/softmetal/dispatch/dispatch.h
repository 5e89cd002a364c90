/* The one thing native/metal wants of libdispatch: bytes as an object, for newLibraryWithData. */
#ifndef SOFTMETAL_DISPATCH_H
#define SOFTMETAL_DISPATCH_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dispatch_data {
    void *bytes;
} *dispatch_data_t;

/* Copies `buffer` when `destructor` is DISPATCH_DATA_DESTRUCTOR_DEFAULT, as the original does; no other one is here. */
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT NULL
dispatch_data_t dispatch_data_create(const void *buffer, size_t size, void *queue, void *destructor);
void dispatch_release(dispatch_data_t object);

#ifdef __cplusplus
}
#endif

#endif
