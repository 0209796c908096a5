-- The rebuild is complete. (KEYS: the registry, the servers. ARGV: now_us, number of the attempt, epoch, the servers filled)

if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] then
  return {'lost'}
end
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[1], 'epoch', ARGV[3])
redis.call('HDEL', KEYS[1], 'owner', 'until_us')
return {'finished'}
