// Opening a GPU, and its buffers.
#import "context.h"

void ferrum_metal_fail(metal_message *message, NSString *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    NSString *text = [[NSString alloc] initWithFormat:format arguments:arguments];
    va_end(arguments);
    snprintf(message->text, sizeof(message->text), "%s", [text UTF8String]);
    [text release];
}

@implementation FerrumContext
- (void)dealloc {
    [archive release];
    [archiveURL release];
    [library release];
    [queue release];
    [device release];
    [super dealloc];
}
@end

// What the kernels are written for: SIMD-group matrices and shuffles come with family Apple7 (M1), addresses of buffers
// inside of buffers with Metal 3.
static BOOL device_will_do(id<MTLDevice> device, metal_message *message) {
    if (!device) {
        ferrum_metal_fail(message, @"this machine has no GPU that Metal can use");
        return NO;
    }
    if (![device supportsFamily:MTLGPUFamilyMetal3] || ![device supportsFamily:MTLGPUFamilyApple7] ||
        ![device hasUnifiedMemory]) {
        ferrum_metal_fail(message, @"expected a GPU of family Apple7 (M1) or later with Metal 3, got \"%@\"",
                          [device name]);
        return NO;
    }
    return YES;
}

metal_context *metal_open(const metal_options *options, metal_message *message) {
    @autoreleasepool {
        FerrumContext *context = [[FerrumContext alloc] init];
        context->device = MTLCreateSystemDefaultDevice();
        if (device_will_do(context->device, message)) {
            snprintf(context->name, sizeof(context->name), "%s", [[context->device name] UTF8String]);
            context->queue = [context->device newCommandQueue];
            [context->queue setLabel:@"pyferrum"];
            if (!context->queue)
                ferrum_metal_fail(message, @"Metal gives no command queue on \"%s\"", context->name);
            else if (ferrum_metal_load(context, options->archive, message))
                return (metal_context *)context;
        }
        [context release];
        return NULL;
    }
}

void metal_close(metal_context *context) {
    @autoreleasepool {
        [(FerrumContext *)context release];
    }
}

const char *metal_name(const metal_context *context) {
    return ((FerrumContext *)context)->name;
}

uint64_t metal_longest_buffer(const metal_context *context) {
    return [((FerrumContext *)context)->device maxBufferLength];
}

// A GPU address is 64 bits wide and a buffer's label a string: nothing else is asked of a new buffer. Hazard tracking
// stays on: it is what orders command buffers that touch the same memory.
static metal_buffer *labelled(id<MTLBuffer> buffer, const char *label) {
    [buffer setLabel:[NSString stringWithUTF8String:label]];
    return (metal_buffer *)buffer;
}

metal_buffer *metal_buffer_new(metal_context *context, uint64_t bytes, const char *label) {
    @autoreleasepool {
        id<MTLDevice> device = ((FerrumContext *)context)->device;
        return labelled([device newBufferWithLength:bytes options:MTLResourceStorageModeShared], label);
    }
}

metal_buffer *metal_buffer_wrap(metal_context *context, void *data, uint64_t bytes, const char *label) {
    @autoreleasepool {
        id<MTLDevice> device = ((FerrumContext *)context)->device;
        return labelled([device newBufferWithBytesNoCopy:data
                                                  length:bytes
                                                 options:MTLResourceStorageModeShared
                                             deallocator:nil],
                        label);
    }
}

void metal_buffer_release(metal_buffer *buffer) {
    @autoreleasepool {
        [(id<MTLBuffer>)buffer release];
    }
}

void *metal_buffer_contents(metal_buffer *buffer) {
    return [(id<MTLBuffer>)buffer contents];
}

uint64_t metal_buffer_address(metal_buffer *buffer) {
    return [(id<MTLBuffer>)buffer gpuAddress];
}
