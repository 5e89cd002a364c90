// Encoding launches into a command buffer, and what comes back when it is done.
#import "context.h"

@implementation FerrumCommands
- (void)dealloc {
    [encoder release];
    [buffer release];
    [super dealloc];
}
@end

metal_commands *metal_commands_begin(metal_context *context) {
    @autoreleasepool {
        MTLCommandBufferDescriptor *descriptor = [[[MTLCommandBufferDescriptor alloc] init] autorelease];
        // Whoever commits keeps every buffer alive until the end, so Metal need not.
        [descriptor setRetainedReferences:NO];
        // A failure then says which encoder it was, and how far that got.
        [descriptor setErrorOptions:MTLCommandBufferErrorOptionEncoderExecutionStatus];
        FerrumCommands *commands = [[FerrumCommands alloc] init];
        commands->buffer = [[((FerrumContext *)context)->queue commandBufferWithDescriptor:descriptor] retain];
        [commands->buffer setLabel:@"pyferrum"];
        commands->encoder = [[commands->buffer computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent] retain];
        [commands->encoder setLabel:@"pyferrum"];
        if (commands->encoder) return (metal_commands *)commands;
        [commands release];
        return NULL;
    }
}

void metal_commands_use(metal_commands *handle, metal_buffer *const *buffers, uint64_t count) {
    if (count == 0) return;
    @autoreleasepool {
        [((FerrumCommands *)handle)->encoder useResources:(const id<MTLResource> *)buffers
                                                    count:count
                                                    usage:MTLResourceUsageRead | MTLResourceUsageWrite];
    }
}

void metal_commands_begin_group(metal_commands *handle, const char *label) {
    FerrumCommands *commands = (FerrumCommands *)handle;
    @autoreleasepool {
        NSString *text = [NSString stringWithUTF8String:label];
        [commands->encoder pushDebugGroup:text];
        // Signposts are what a failed encoder remembers: the last one it passed names the culprit.
        [commands->encoder insertDebugSignpost:text];
    }
}

void metal_commands_end_group(metal_commands *handle) {
    @autoreleasepool {
        [((FerrumCommands *)handle)->encoder popDebugGroup];
    }
}

void metal_commands_barrier(metal_commands *handle) {
    @autoreleasepool {
        [((FerrumCommands *)handle)->encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    }
}

void metal_commands_dispatch(metal_commands *handle, const metal_dispatch *dispatch) {
    FerrumCommands *commands = (FerrumCommands *)handle;
    @autoreleasepool {
        id<MTLComputeCommandEncoder> encoder = commands->encoder;
        if (commands->bound != dispatch->pipeline) {
            commands->bound = dispatch->pipeline;
            [encoder setComputePipelineState:(id<MTLComputePipelineState>)dispatch->pipeline];
        }
        for (uint32_t i = 0; i < dispatch->binding_count; i++) {
            const metal_binding *binding = &dispatch->bindings[i];
            [encoder setBuffer:(id<MTLBuffer>)binding->buffer offset:binding->offset atIndex:binding->slot];
        }
        if (dispatch->params_bytes)
            [encoder setBytes:dispatch->params length:dispatch->params_bytes atIndex:dispatch->params_slot];
        if (dispatch->threadgroup_bytes) [encoder setThreadgroupMemoryLength:dispatch->threadgroup_bytes atIndex:0];
        [encoder dispatchThreadgroups:MTLSizeMake(dispatch->grid[0], dispatch->grid[1], dispatch->grid[2])
                threadsPerThreadgroup:MTLSizeMake(dispatch->threads[0], dispatch->threads[1], dispatch->threads[2])];
    }
}

// The group that a failed command buffer was in: the last signpost of the encoder that is to blame, or was cut short.
static NSString *culprit(NSError *error) {
    NSString *found = @"";
    for (id<MTLCommandBufferEncoderInfo> info in [[error userInfo] objectForKey:MTLCommandBufferEncoderInfoErrorKey]) {
        const MTLCommandEncoderErrorState state = [info errorState];
        if (state == MTLCommandEncoderErrorStateFaulted || state == MTLCommandEncoderErrorStateAffected)
            if ([[info debugSignposts] count]) found = [[info debugSignposts] lastObject];
        if (state == MTLCommandEncoderErrorStateFaulted) break;
    }
    return found;
}

void metal_commands_commit(metal_commands *handle, metal_done done, void *user) {
    FerrumCommands *commands = (FerrumCommands *)handle;
    @autoreleasepool {
        [commands->encoder endEncoding];
        [commands->buffer addCompletedHandler:^(id<MTLCommandBuffer> buffer) {
          @autoreleasepool {
              NSError *error = [buffer status] == MTLCommandBufferStatusError ? [buffer error] : nil;
              if ([buffer status] == MTLCommandBufferStatusCompleted)
                  done(user, NULL, "");
              else if (error)
                  done(user, [[error localizedDescription] UTF8String], [culprit(error) UTF8String]);
              else
                  done(user, "Metal does not say why", "");
          }
        }];
        [commands->buffer commit];
        [commands release];
    }
}
