-- Acquires every name for one owner, or none of them. The attempt of a waiter enters (or stays in) the queue of the busy name
-- that the answer has. No attempt overtakes a live waiter that came earlier.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their queues
--         3n+1 .. 4n     their metadata companions, only when there is metadata
--         the last one   the last fencing token of all names (last.lua), on a single server
-- ARGV    1  the owner's token
--         2  the ttl in ms
--         3  how long a fence companion lasts, in ms: longer than the lease, in a cluster by a day
--         4  the process id and the host
--         5  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         the rest only where one of them is needed
--         6  the waiter's member of the queue, or nothing for a claim that does not wait
--         7  the waiter's number, or 0 when it has none yet
--         8  the least fencing token of this grant: that of the claim's names in other slots, or 0
--         9  the metadata, only when there is some
-- Answer  granted:   the fencing token, an integer
--         busy:      { the index of the first busy key, its PTTL, the waiter's number, 1 when another call has to hand off a
--                    name that was rolled back, the server's clock in microseconds }
--         undecided: {}: the script removed dead waiters, and there may be more; the caller calls again at once. The waiter
--                    is in the queue of the first name, so that no later attempt of the same pipeline is granted before it
--
-- Every lock is read before anything is granted, because a read fails if the key has another type.

local to = ARGV[5]
local reserved, least = owner .. '-next', tonumber(ARGV[8] or 0)

-- `queued`: the names with a queue that are not busy, and whether they are reserved for this owner.
local ours, busy, queued = 0, nil, nil
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder == owner then
    ours = ours + 1
  elseif holder and holder ~= reserved then
    busy = i
    break
  elseif redis.call('EXISTS', KEYS[n + n + i]) == 1 then
    queued = queued or {}
    queued[i] = holder and true
  end
end

local me, number

if busy or queued then
  if ARGV[6] ~= '' then
    me = ARGV[6]
  end
  number = tonumber(ARGV[7] or 0)
  for i = 1, busy and busy - 1 or n do
    if queued and queued[i] == false then
      local passed = pass(KEYS[i], KEYS[n + n + i], KEYS[n + i], to, me, number > 0 and number)
      if passed == nil then
        -- A first name that this owner already holds is busy for later attempts.
        if me and redis.call('GET', KEYS[1]) ~= owner then
          enter(KEYS[n + n + 1], me, number)
        end
        return {}
      elseif passed then
        busy = i
        break
      end
    end
  end
end

if busy then
  local more = 0
  for i = 1, n > 1 and n or 0 do
    if i ~= busy then
      -- All or nothing, and one position at a time. A waiter reserves the names before the busy one until its next attempt, which
      -- comes in time. So waiters acquire names in sort order, which cannot deadlock, and callers that keep each of the names
      -- busy do not starve a waiter for all of them.
      local queue, holder = KEYS[n + n + i], redis.call('GET', KEYS[i])
      if me then
        redis.call('ZREM', queue, me)
        mark_alive(queue, me)
      end
      if me and i < busy then
        redis.call('SET', KEYS[i], reserved, 'PX', math.min(ALIVE_MS, tonumber(ttl)))
      elseif holder == owner or holder == reserved then
        local passed = pass(KEYS[i], queue, KEYS[n + i], to)
        if not passed then
          redis.call('DEL', KEYS[i])
        end
        if passed == nil then
          more = 1
        end
      end
    end
  end
  if me then
    number = enter(KEYS[n + n + busy], me, number)
  end
  return { busy, redis.call('PTTL', KEYS[busy]), number, more, microseconds() }
end

local fence, record
if ours == n then
  -- A retry after a lost reply: the earlier grant, with at least a full ttl.
  local last = redis.call('GET', KEYS[n + 1])
  local known, token = string.match(last or '', '^(%d+) (%x+) ')
  if token == owner then
    -- Of a hand-off: an attempt has found it now.
    fence, record = tonumber(known), string.gsub(last, '^(%d+ %x+ %d+ %d+):0 ', '%1 ')
    if LAST then
      -- Every grant raises it to the clock: plain commands rely on that (src/engine/redis/ops/acquire_plain.rs).
      redis.call('SET', LAST, string.format('%.0f', larger(microseconds(), LAST)))
    end
    if fence < least then
      -- A part of a claim, so this is a cluster: it has no key of the last token to raise.
      fence, record = least, string.format('%.0f', least) .. string.sub(last, #known + 1)
    end
    -- The retry may be late, after the lease was extended: a longer lease keeps its time.
    for i = 1, n do
      local more = redis.call('PTTL', KEYS[i]) - ttl
      if more > 0 then
        ttl, kept = ttl + more, kept + more
      end
    end
  end
end
if not record then
  fence = microseconds()
  local since = math.floor(fence / 1000)
  fence = math.max(fence, least)
  for i = n + 1, LAST and n + 1 or n + n do
    fence = larger(fence, LAST or KEYS[i])
  end
  if LAST then
    redis.call('SET', LAST, string.format('%.0f', fence))
  end
  record = string.format('%.0f %s %.0f %s', fence, owner, since, ARGV[4])
end

for i = 1, n do
  redis.call('SET', KEYS[i], owner, 'PX', ttl)
  redis.call('SET', KEYS[n + i], record, 'PX', kept)
  if metadata then
    redis.call('SET', KEYS[n + n + n + i], owner .. ' ' .. metadata, 'PX', ttl)
  end
  if me and queued[i] ~= nil then
    local queue = KEYS[n + n + i]
    redis.call('ZREM', queue, me)
    if #redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'LIMIT', 0, 1) == 0 then
      clear(queue)
    else
      mark_alive(queue, me)
    end
  end
end
return fence
