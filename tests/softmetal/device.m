// The device, its buffers, and what tests ask about SoftMetal.
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#import "soft.h"

uint64_t softmetal_order = 1;
uint32_t softmetal_simd_width = 32, softmetal_threads = 1024;

NSString *const MTLCommandBufferEncoderInfoErrorKey = @"MTLCommandBufferEncoderInfoErrorKey";

// ---- For tests

static atomic_ullong live_objects, dispatches_run, buffers_committed, pipelines_compiled;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char complaint[512], failing_kernel[128];

uint64_t softmetal_live_objects(void) {
    return live_objects;
}

void soft_count(uint64_t dispatches, uint64_t command_buffers, uint64_t compiled) {
    dispatches_run += dispatches;
    buffers_committed += command_buffers;
    pipelines_compiled += compiled;
}

void softmetal_count(softmetal_counts *counts) {
    counts->dispatches = dispatches_run;
    counts->command_buffers = buffers_committed;
    counts->compiled = pipelines_compiled;
    counts->buffer_bytes = soft_memory_bytes();
}

void soft_complain(NSString *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    NSString *text = [[NSString alloc] initWithFormat:format arguments:arguments];
    va_end(arguments);
    pthread_mutex_lock(&lock);
    if (!complaint[0]) snprintf(complaint, sizeof(complaint), "%s", [text UTF8String]);
    pthread_mutex_unlock(&lock);
    [text release];
}

const char *softmetal_complaint(void) {
    static char given[sizeof(complaint)];
    pthread_mutex_lock(&lock);
    memcpy(given, complaint, sizeof(given));
    complaint[0] = 0;
    pthread_mutex_unlock(&lock);
    return given;
}

void softmetal_fail_kernel(const char *name) {
    pthread_mutex_lock(&lock);
    snprintf(failing_kernel, sizeof(failing_kernel), "%s", name ? name : "");
    pthread_mutex_unlock(&lock);
}

BOOL soft_should_fail(const char *kernel) {
    pthread_mutex_lock(&lock);
    const BOOL fail = strcmp(kernel, failing_kernel) == 0;
    if (fail) failing_kernel[0] = 0;
    pthread_mutex_unlock(&lock);
    return fail;
}

void softmetal_set_order(uint64_t seed) {
    softmetal_order = seed;
    emu_set_order(seed > 1 ? seed : 0);
}

void softmetal_set_limits(uint32_t simd_width, uint32_t threads) {
    softmetal_simd_width = simd_width;
    softmetal_threads = threads;
}

NSError *soft_error(NSInteger code, NSString *message) {
    return [NSError errorWithDomain:@"SoftMetal"
                               code:code
                           userInfo:[NSDictionary dictionaryWithObject:message forKey:NSLocalizedDescriptionKey]];
}

@implementation SoftObject
- (id)init {
    if ((self = [super init])) live_objects++;
    return self;
}
- (void)dealloc {
    live_objects--;
    [super dealloc];
}
@end

// ---- Buffers

@implementation SoftBuffer
- (id)initWithRange:(soft_range *)aRange {
    if ((self = [super init])) range = aRange;
    return self;
}
- (void)dealloc {
    soft_range_free(range);
    [super dealloc];
}
- (void *)contents {
    return range->host;
}
- (uint64_t)gpuAddress {
    return (uint64_t)range->gpu;
}
- (void)setLabel:(NSString *)label {
    snprintf(range->label, sizeof(range->label), "%s", [label UTF8String]);
}
@end

// ---- Device

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
    return [[SoftDevice alloc] init];
}

@implementation SoftDevice
- (NSString *)name {
    return @"SoftMetal";
}
- (BOOL)supportsFamily:(MTLGPUFamily)gpuFamily {
    return gpuFamily == MTLGPUFamilyApple7 || gpuFamily == MTLGPUFamilyMetal3;
}
- (BOOL)hasUnifiedMemory {
    return YES;
}
- (NSUInteger)maxBufferLength {
    return 1 << 30;
}
- (id<MTLCommandQueue>)newCommandQueue {
    return [[SoftQueue alloc] init];
}

- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
    if (options != MTLResourceStorageModeShared) soft_complain(@"newBufferWithLength: only shared storage is here");
    if (length == 0 || length > [self maxBufferLength]) {
        soft_complain(@"newBufferWithLength: expected 1…%lu bytes, got %lu", (unsigned long)[self maxBufferLength],
                      (unsigned long)length);
        return nil;
    }
    soft_range *range = soft_range_new(length);
    return range ? [[SoftBuffer alloc] initWithRange:range] : nil;
}

- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void *, NSUInteger))deallocator {
    const char *reason = "only shared storage without a deallocator is here, and no more than maxBufferLength";
    soft_range *range = NULL;
    if (options == MTLResourceStorageModeShared && !deallocator && length <= [self maxBufferLength])
        range = soft_range_borrow(pointer, length, &reason);
    if (range) return [[SoftBuffer alloc] initWithRange:range];
    soft_complain(@"newBufferWithBytesNoCopy: %s", reason);
    return nil;
}

- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error {
    NSString *mistake = nil;
    if (!options || options->fastMathEnabled || options->languageVersion != MTLLanguageVersion3_0)
        mistake = @"the shaders want language version 3.0 without fast math";
    else if ([source rangeOfString:@"kernel"].location == NSNotFound)
        mistake = @"the source has no kernel";
    else if ([source rangeOfString:@"#include \""].location != NSNotFound)
        mistake = @"the source includes a file, which Metal cannot find at run time";
    if (!mistake) return [[SoftLibrary alloc] init];
    if (error) *error = soft_error(3, mistake);
    return nil;
}

- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError **)error {
    if (memcmp(data->bytes, "MTLB", 4) == 0) return [[SoftLibrary alloc] init];
    if (error) *error = soft_error(1, @"the data is not a Metal library");
    return nil;
}

- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor *)descriptor
                                                 error:(NSError **)error {
    SoftArchive *archive = [[SoftArchive alloc] init];
    if (!descriptor->url) return archive;
    NSString *text = [NSString stringWithContentsOfFile:[descriptor->url path]
                                               encoding:NSUTF8StringEncoding
                                                  error:NULL];
    if ([text hasPrefix:@"SoftMetal pipelines\n"]) {
        [archive->entries addObjectsFromArray:[text componentsSeparatedByString:@"\n"]];
        return archive;
    }
    [archive release];
    if (error) *error = soft_error(1, @"the file is not an archive of pipelines");
    return nil;
}

- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLAutoreleasedComputePipelineReflection *)reflection
                                                               error:(NSError **)error {
    SoftFunction *function = (SoftFunction *)descriptor->computeFunction;
    if (!function || reflection) {
        if (error) *error = soft_error(1, @"a pipeline wants a function, and reflection is not here");
        return nil;
    }
    NSString *key = [NSString stringWithFormat:@"%s %u", function->kernel->name, function->constants];
    BOOL found = NO;
    for (SoftArchive *archive in descriptor->binaryArchives) found = found || [archive->entries containsObject:key];
    if (!found && options & MTLPipelineOptionFailOnBinaryArchiveMiss) {
        if (error) *error = soft_error(2, @"no archive has this pipeline");
        return nil;
    }
    if (!found) soft_count(0, 0, 1);
    SoftPipeline *pipeline = [[SoftPipeline alloc] init];
    pipeline->kernel = function->kernel;
    pipeline->constants = function->constants;
    pipeline->wholeSimdgroups = descriptor->threadGroupSizeIsMultipleOfThreadExecutionWidth;
    return pipeline;
}
@end
