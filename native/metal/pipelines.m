// Shaders to pipelines: the library, function constants, limits, and the archive of what was compiled before.
#import "context.h"

#include <dispatch/dispatch.h>

static id<MTLLibrary> new_library(id<MTLDevice> device, NSError **error) {
    if (ferrum_metallib_size) {
        dispatch_data_t data =
            dispatch_data_create(ferrum_metallib, ferrum_metallib_size, NULL, DISPATCH_DATA_DESTRUCTOR_DEFAULT);
        id<MTLLibrary> library = [device newLibraryWithData:data error:error];
        dispatch_release(data);
        return library;
    }
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    [options setLanguageVersion:MTLLanguageVersion3_0];
    // Fast math may assume that there are no NaN and no infinities, and may reorder sums: neither is ours to give away.
    [options setFastMathEnabled:NO];
    NSString *source = [[NSString alloc] initWithUTF8String:(const char *)ferrum_shader_source];
    id<MTLLibrary> library = [device newLibraryWithSource:source options:options error:error];
    [source release];
    [options release];
    return library;
}

// An archive that cannot be read, such as one from another version of macOS, is replaced.
static id<MTLBinaryArchive> new_archive(id<MTLDevice> device, NSURL *url) {
    MTLBinaryArchiveDescriptor *descriptor = [[MTLBinaryArchiveDescriptor alloc] init];
    id<MTLBinaryArchive> archive = nil;
    if ([[NSFileManager defaultManager] fileExistsAtPath:[url path]]) {
        [descriptor setUrl:url];
        archive = [device newBinaryArchiveWithDescriptor:descriptor error:NULL];
    }
    if (!archive) {
        [descriptor setUrl:nil];
        archive = [device newBinaryArchiveWithDescriptor:descriptor error:NULL];
    }
    [descriptor release];
    return archive;
}

BOOL ferrum_metal_load(FerrumContext *context, const char *archive, metal_message *message) {
    NSError *error = nil;
    context->library = new_library(context->device, &error);
    if (!context->library) {
        ferrum_metal_fail(message, @"the shaders do not compile on \"%s\": %@", context->name,
                          [error localizedDescription]);
        return NO;
    }
    [context->library setLabel:@"pyferrum"];
    if (archive) {
        context->archiveURL = [[NSURL alloc] initFileURLWithPath:[NSString stringWithUTF8String:archive]];
        context->archive = new_archive(context->device, context->archiveURL);
    }
    return YES;
}

void metal_save(metal_context *handle) {
    FerrumContext *context = (FerrumContext *)handle;
    if (!context->archiveChanged) return;
    @autoreleasepool {
        // Written beside its place and moved there: a process that opens it meanwhile sees the old one or the new one.
        NSString *path = [context->archiveURL path];
        NSString *fresh = [NSString stringWithFormat:@"%@.%d", path, [[NSProcessInfo processInfo] processIdentifier]];
        [[NSFileManager defaultManager] createDirectoryAtPath:[path stringByDeletingLastPathComponent]
                                  withIntermediateDirectories:YES
                                                   attributes:nil
                                                        error:NULL];
        if ([context->archive serializeToURL:[NSURL fileURLWithPath:fresh] error:NULL])
            rename([fresh fileSystemRepresentation], [path fileSystemRepresentation]);
        context->archiveChanged = NO;
    }
}

static id<MTLComputePipelineState> new_state(FerrumContext *context, NSString *name, uint32_t constants,
                                             NSError **error) {
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    for (NSUInteger i = 0; i < 32; i++) {
        BOOL value = constants >> i & 1;
        [values setConstantValue:&value type:MTLDataTypeBool atIndex:i];
    }
    id<MTLFunction> function = [context->library newFunctionWithName:name constantValues:values error:error];
    [values release];
    if (!function) return nil;

    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor alloc] init];
    [descriptor setComputeFunction:function];
    [descriptor setLabel:name];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    id<MTLComputePipelineState> state = nil;
    if (context->archive) {
        [descriptor setBinaryArchives:[NSArray arrayWithObject:context->archive]];
        state = [context->device newComputePipelineStateWithDescriptor:descriptor
                                                               options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                                            reflection:NULL
                                                                 error:NULL];
        [descriptor setBinaryArchives:nil];
    }
    if (!state) {
        state = [context->device newComputePipelineStateWithDescriptor:descriptor
                                                               options:MTLPipelineOptionNone
                                                            reflection:NULL
                                                                 error:error];
        if (state && [context->archive addComputePipelineFunctionsWithDescriptor:descriptor error:NULL])
            context->archiveChanged = YES;
    }
    [descriptor release];
    [function release];
    return state;
}

metal_pipeline *metal_pipeline_new(metal_context *context, const char *name, uint32_t constants,
                                   metal_message *message) {
    @autoreleasepool {
        NSError *error = nil;
        id<MTLComputePipelineState> state =
            new_state((FerrumContext *)context, [NSString stringWithUTF8String:name], constants, &error);
        if (!state)
            ferrum_metal_fail(message, @"kernel %s (constants %u) has no pipeline: %@", name, constants,
                              [error localizedDescription]);
        return (metal_pipeline *)state;
    }
}

void metal_pipeline_release(metal_pipeline *pipeline) {
    @autoreleasepool {
        [(id<MTLComputePipelineState>)pipeline release];
    }
}

metal_limits metal_pipeline_limits(metal_pipeline *pipeline) {
    id<MTLComputePipelineState> state = (id<MTLComputePipelineState>)pipeline;
    metal_limits limits = {(uint32_t)[state threadExecutionWidth], (uint32_t)[state maxTotalThreadsPerThreadgroup],
                           (uint32_t)[state staticThreadgroupMemoryLength]};
    return limits;
}
