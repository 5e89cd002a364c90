/* Metal's API, as much of it as native/metal uses and nothing else; SoftMetal's classes are behind it.
 *
 * The build puts this folder before the system's, so that `#import <Metal/Metal.h>` finds it on Linux.
 * tests/test_metal_header.py compares every selector, type and number here with Apple's metal-cpp.
 */
#import <Foundation/Foundation.h>

#include <dispatch/dispatch.h>

/* ---- Numbers */

typedef NS_ENUM(NSInteger, MTLGPUFamily) {
    MTLGPUFamilyApple7 = 1007,
    MTLGPUFamilyMetal3 = 5001,
};

typedef NS_OPTIONS(NSUInteger, MTLResourceOptions) {
    MTLResourceStorageModeShared = 0,
};

typedef NS_OPTIONS(NSUInteger, MTLResourceUsage) {
    MTLResourceUsageRead = 1,
    MTLResourceUsageWrite = 2,
};

typedef NS_OPTIONS(NSUInteger, MTLBarrierScope) {
    MTLBarrierScopeBuffers = 1,
};

typedef NS_ENUM(NSUInteger, MTLDispatchType) {
    MTLDispatchTypeSerial = 0,
    MTLDispatchTypeConcurrent = 1,
};

typedef NS_ENUM(NSUInteger, MTLDataType) {
    MTLDataTypeBool = 53,
};

typedef NS_ENUM(NSUInteger, MTLLanguageVersion) {
    MTLLanguageVersion3_0 = 196608,
};

typedef NS_OPTIONS(NSUInteger, MTLPipelineOption) {
    MTLPipelineOptionNone = 0,
    MTLPipelineOptionFailOnBinaryArchiveMiss = 4,
};

typedef NS_ENUM(NSUInteger, MTLCommandBufferStatus) {
    MTLCommandBufferStatusNotEnqueued = 0,
    MTLCommandBufferStatusEnqueued = 1,
    MTLCommandBufferStatusCommitted = 2,
    MTLCommandBufferStatusScheduled = 3,
    MTLCommandBufferStatusCompleted = 4,
    MTLCommandBufferStatusError = 5,
};

typedef NS_OPTIONS(NSUInteger, MTLCommandBufferErrorOption) {
    MTLCommandBufferErrorOptionNone = 0,
    MTLCommandBufferErrorOptionEncoderExecutionStatus = 1,
};

typedef NS_ENUM(NSInteger, MTLCommandEncoderErrorState) {
    MTLCommandEncoderErrorStateUnknown = 0,
    MTLCommandEncoderErrorStateCompleted = 1,
    MTLCommandEncoderErrorStateAffected = 2,
    MTLCommandEncoderErrorStatePending = 3,
    MTLCommandEncoderErrorStateFaulted = 4,
};

typedef struct {
    NSUInteger width;
    NSUInteger height;
    NSUInteger depth;
} MTLSize;

static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
    MTLSize size = {width, height, depth};
    return size;
}

/* ---- Resources */

@protocol MTLResource <NSObject>
- (void)setLabel:(NSString *)label;
@end

@protocol MTLBuffer <MTLResource>
- (void *)contents;
- (uint64_t)gpuAddress;
@end

/* ---- Functions and pipelines */

@interface MTLCompileOptions : NSObject {
   @package
    BOOL fastMathEnabled;
    MTLLanguageVersion languageVersion;
}
- (void)setFastMathEnabled:(BOOL)fastMathEnabled;
- (void)setLanguageVersion:(MTLLanguageVersion)languageVersion;
@end

@interface MTLFunctionConstantValues : NSObject {
   @package
    uint64_t given;
    uint64_t values;
    BOOL wrongType;
}
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index;
@end

@protocol MTLFunction <NSObject>
@end

@protocol MTLLibrary <NSObject>
- (void)setLabel:(NSString *)label;
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)constantValues
                                 error:(NSError **)error;
@end

@protocol MTLBinaryArchive;

@interface MTLComputePipelineDescriptor : NSObject {
   @package
    NSString *label;
    id<MTLFunction> computeFunction;
    NSArray *binaryArchives;
    BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
}
- (void)setLabel:(NSString *)label;
- (void)setComputeFunction:(id<MTLFunction>)computeFunction;
- (void)setBinaryArchives:(NSArray *)binaryArchives;
- (void)setThreadGroupSizeIsMultipleOfThreadExecutionWidth:(BOOL)threadGroupSizeIsMultipleOfThreadExecutionWidth;
@end

@class MTLComputePipelineReflection;
typedef MTLComputePipelineReflection *MTLAutoreleasedComputePipelineReflection;

@protocol MTLComputePipelineState <NSObject>
- (NSUInteger)maxTotalThreadsPerThreadgroup;
- (NSUInteger)threadExecutionWidth;
- (NSUInteger)staticThreadgroupMemoryLength;
@end

@interface MTLBinaryArchiveDescriptor : NSObject {
   @package
    NSURL *url;
}
- (void)setUrl:(NSURL *)url;
@end

@protocol MTLBinaryArchive <NSObject>
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor *)descriptor error:(NSError **)error;
- (BOOL)serializeToURL:(NSURL *)url error:(NSError **)error;
@end

/* ---- Commands */

@protocol MTLCommandEncoder <NSObject>
- (void)setLabel:(NSString *)label;
- (void)endEncoding;
- (void)insertDebugSignpost:(NSString *)string;
- (void)pushDebugGroup:(NSString *)string;
- (void)popDebugGroup;
@end

@protocol MTLComputeCommandEncoder <MTLCommandEncoder>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)useResources:(const id<MTLResource> *)resources count:(NSUInteger)count usage:(MTLResourceUsage)usage;
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope;
- (void)dispatchThreadgroups:(MTLSize)threadgroupsPerGrid threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
@end

@protocol MTLCommandBuffer;
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer> buffer);

@interface MTLCommandBufferDescriptor : NSObject {
   @package
    BOOL retainedReferences;
    MTLCommandBufferErrorOption errorOptions;
}
- (void)setRetainedReferences:(BOOL)retainedReferences;
- (void)setErrorOptions:(MTLCommandBufferErrorOption)errorOptions;
@end

@protocol MTLCommandBuffer <NSObject>
- (void)setLabel:(NSString *)label;
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)dispatchType;
- (void)addCompletedHandler:(MTLCommandBufferHandler)block;
- (void)commit;
- (MTLCommandBufferStatus)status;
- (NSError *)error;
@end

@protocol MTLCommandQueue <NSObject>
- (void)setLabel:(NSString *)label;
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor *)descriptor;
@end

/* An error's userInfo holds an array of these under MTLCommandBufferEncoderInfoErrorKey. */
@protocol MTLCommandBufferEncoderInfo <NSObject>
- (NSString *)label;
- (NSArray *)debugSignposts;
- (MTLCommandEncoderErrorState)errorState;
@end

extern NSString *const MTLCommandBufferEncoderInfoErrorKey;

/* ---- Device */

@protocol MTLDevice <NSObject>
- (NSString *)name;
- (BOOL)supportsFamily:(MTLGPUFamily)gpuFamily;
- (BOOL)hasUnifiedMemory;
- (NSUInteger)maxBufferLength;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void *pointer, NSUInteger length))deallocator;
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error;
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError **)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLAutoreleasedComputePipelineReflection *)reflection
                                                               error:(NSError **)error;
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor *)descriptor error:(NSError **)error;
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;
