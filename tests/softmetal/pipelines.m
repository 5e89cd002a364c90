// Libraries, functions, pipelines and archives: the linked kernels of the emulator under Metal's names.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#import "soft.h"

struct dispatch_data *dispatch_data_create(const void *buffer, size_t size, void *queue, void *destructor) {
    (void)queue, (void)destructor;
    struct dispatch_data *data = malloc(sizeof(*data));
    data->bytes = memcpy(calloc(1, size + 4), buffer, size);
    return data;
}

void dispatch_release(dispatch_data_t object) {
    free(object->bytes);
    free(object);
}

@implementation MTLCompileOptions
- (id)init {
    if ((self = [super init])) fastMathEnabled = YES;  // as Metal's are
    return self;
}
- (void)setFastMathEnabled:(BOOL)enabled {
    fastMathEnabled = enabled;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
    languageVersion = version;
}
@end

@implementation MTLFunctionConstantValues
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index {
    if (type != MTLDataTypeBool || index >= 32) {
        soft_complain(@"setConstantValue: expected a bool at 0…31, got type %lu at %lu", (unsigned long)type,
                      (unsigned long)index);
        return;
    }
    const uint64_t bit = (uint64_t)1 << index;
    given |= bit;
    values = *(const BOOL *)value ? values | bit : values & ~bit;
}
@end

@implementation SoftLibrary
- (void)setLabel:(NSString *)label {
    (void)label;
}

- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)constantValues
                                 error:(NSError **)error {
    const emu_kernel *kernel = emu_find_kernel([name UTF8String]);
    const uint64_t missing = kernel ? kernel->constants_used & ~constantValues->given : 0;
    if (!kernel || missing) {
        NSString *text = kernel ? [NSString stringWithFormat:@"function %@ wants function constant %d", name,
                                                             __builtin_ctzll(missing)]
                                : [NSString stringWithFormat:@"there is no function %@", name];
        if (error) *error = soft_error(1, text);
        return nil;
    }
    SoftFunction *function = [[SoftFunction alloc] init];
    function->kernel = kernel;
    function->constants = (uint32_t)constantValues->values;
    return function;
}
@end

@implementation SoftFunction
@end

@implementation MTLComputePipelineDescriptor
- (void)dealloc {
    [label release];
    [computeFunction release];
    [binaryArchives release];
    [super dealloc];
}
- (void)setLabel:(NSString *)value {
    [label autorelease];
    label = [value copy];
}
- (void)setComputeFunction:(id<MTLFunction>)value {
    [computeFunction autorelease];
    computeFunction = [value retain];
}
- (void)setBinaryArchives:(NSArray *)value {
    [binaryArchives autorelease];
    binaryArchives = [value copy];
}
- (void)setThreadGroupSizeIsMultipleOfThreadExecutionWidth:(BOOL)value {
    threadGroupSizeIsMultipleOfThreadExecutionWidth = value;
}
@end

@implementation SoftPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
    return softmetal_threads;
}
- (NSUInteger)threadExecutionWidth {
    return softmetal_simd_width;
}
- (NSUInteger)staticThreadgroupMemoryLength {
    return 0;  // the emulator finds out when a kernel runs
}
@end

@implementation MTLBinaryArchiveDescriptor
- (void)dealloc {
    [url release];
    [super dealloc];
}
- (void)setUrl:(NSURL *)value {
    [url autorelease];
    url = [value copy];
}
@end

@implementation SoftArchive
- (id)init {
    if ((self = [super init])) entries = [[NSMutableSet alloc] init];
    return self;
}
- (void)dealloc {
    [entries release];
    [super dealloc];
}
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor *)descriptor error:(NSError **)error {
    (void)error;
    SoftFunction *function = (SoftFunction *)descriptor->computeFunction;
    [entries addObject:[NSString stringWithFormat:@"%s %u", function->kernel->name, function->constants]];
    return YES;
}
- (BOOL)serializeToURL:(NSURL *)url error:(NSError **)error {
    NSString *lines =
        [[[entries allObjects] sortedArrayUsingSelector:@selector(compare:)] componentsJoinedByString:@"\n"];
    FILE *file = fopen([[url path] fileSystemRepresentation], "w");  // Foundation would print why it cannot
    if (!file) {
        if (error) *error = soft_error(4, @"the archive cannot be written");
        return NO;
    }
    fprintf(file, "SoftMetal pipelines\n%s", [lines UTF8String]);
    return fclose(file) == 0;
}
@end
