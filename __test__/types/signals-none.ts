// Without the DOM library and @types/node there is no AbortSignal. holdfast declares the part that it uses.
import type { AcquireOptions, Lock, Signal, SignalLike } from '../../index.js'

type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
declare function same<A, B>(equal: Equal<A, B>): void

same<Signal, SignalLike>(true)
same<Lock['signal'], SignalLike>(true)

export const own: AcquireOptions = { signal: { aborted: false, addEventListener() {}, removeEventListener() {} } }

// @ts-expect-error no type of this name exists; if this line compiles, the test proves nothing
export type Missing = AbortSignal
