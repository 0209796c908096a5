-- Drops holds whose lease has run out; returns their request ids, at most ARGV[2].

local ended = redis.call('ZRANGEBYSCORE', keys.leases, '-inf', text(now_us), 'LIMIT', 0, ARGV[2])
for _, request_id in ipairs(ended) do
  local packed = redis.call('HGET', keys.holds, request_id)
  if packed then
    finish(keys, request_id, cmsgpack.unpack(packed), now_us, nil)
  else
    redis.call('ZREM', keys.leases, request_id)
  end
end
return ended
