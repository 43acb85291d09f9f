-- Reads the holder of a name, and the number of waiters.
--
-- KEYS    1  the lock key
--         2  its fence companion
--         3  its metadata companion
--         4  its queue, unless this is a node of a quorum
--         Only the first one where its slot moves: the others may be on another node of the cluster. The two companions are
--         read if they are on this one.
-- ARGV    the two companions, if they are no keys
-- Answer  nil when it is free, else { the lock's value, its PTTL, fence companion or nil, metadata companion or nil, number of
--         waiters: only with a queue }

local value = redis.call('GET', KEYS[1])
-- A reserved name has no holder yet.
if not value or #value == 37 and string.find(value, '^%x+%-next$') then
  return false
end
local waiting
if KEYS[4] then
  -- Counting only the waiters of live processes would take a time that grows with the queue. So dead ones count as long as one
  -- process in the queue is alive (see queue.lua).
  local alive = redis.call('ZCOUNT', KEYS[4], '-inf', '(-' .. redis.call('TIME')[1] .. '000')
  waiting = alive > 0 and redis.call('ZCOUNT', KEYS[4], 0, '+inf') or 0
end
-- MGET reads a key of another type as nil.
local companions = {}
if KEYS[2] then
  companions = redis.call('MGET', KEYS[2], KEYS[3])
else
  for i, key in ipairs(ARGV) do
    local companion = redis.pcall('GET', key)
    companions[i] = type(companion) == 'string' and companion
  end
  waiting = -1
end
return { value, redis.call('PTTL', KEYS[1]), companions[1], companions[2], waiting }
